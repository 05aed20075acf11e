"""Decides which draft tokens are accepted, from a model of the text instead of a recorded file.

Whether a draft token is accepted depends on where it stands in the text and on its place in the draft. Every token of
a text has a random number of its own, drawn once per seed, so that all draft lengths meet the same text, and a short
draft's acceptance is not the beginning of a long one's. Easy text comes in runs (a Markov chain of two states).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

# tokens; length of a text, a power of two; requests begin anywhere in it and wrap around
NUM_TOKENS = 1 << 16
_LAST = NUM_TOKENS - 1
# draft tokens; places whose chance is tabulated; the longest draft that `fixed:N` takes
_LONGEST_DRAFT = 16


@dataclass(frozen=True)
class Acceptance:
    """Chances of acceptance at each place of a draft, given that the places before it were accepted.

    The last place's chance holds for all behind it. hard: the same in hard text; empty: all text is easy.
    easy_run, hard_run: mean tokens of a run. proposed: chance that a draft is found at all for a round.
    """

    easy: tuple[float, ...]
    hard: tuple[float, ...] = ()
    easy_run: float = 16.0
    hard_run: float = 16.0
    proposed: float = 1.0

    def tokens_per_round(self, num_draft_tokens: int) -> float:
        """Mean tokens of a round with such drafts, where all text is easy and every round has one."""
        return 1.0 + sum(math.prod(_chances(self.easy)[:length]) for length in range(1, num_draft_tokens + 1))


NEVER = Acceptance((0.0,))


class Text:
    """One endless text. From `changes_at_s` on (simulated time) the drafter is as good as `later` says."""

    def __init__(
        self, acceptance: Acceptance, seed: int, later: Acceptance | None = None, changes_at_s: float = math.inf
    ) -> None:
        rng = np.random.default_rng(seed)
        self._draws: list[float] = rng.random(NUM_TOKENS).tolist()
        self._finds: list[float] = rng.random(NUM_TOKENS).tolist()
        self._now = _Version(acceptance, np.random.default_rng(seed + 1))
        self._later = _Version(later or acceptance, np.random.default_rng(seed + 1))
        self._changes_at_s = changes_at_s

    def accepted(self, position: int, num_draft_tokens: int, now_s: float) -> int:
        """Draft tokens accepted of those that begin at `position` of the text."""
        version = self._now if now_s < self._changes_at_s else self._later
        chances = version.chances
        for place in range(num_draft_tokens):
            at = (position + place) & _LAST
            if self._draws[at] >= chances[at][place]:
                return place
        return num_draft_tokens

    def is_found(self, position: int, now_s: float) -> bool:
        """Returns whether the method proposes anything for a round that begins at `position`."""
        version = self._now if now_s < self._changes_at_s else self._later
        return self._finds[position & _LAST] < version.proposed


class _Version:
    """chances: by position in the text, then by place in the draft."""

    def __init__(self, acceptance: Acceptance, rng: np.random.Generator) -> None:
        easy, hard = _chances(acceptance.easy), _chances(acceptance.hard or acceptance.easy)
        self.proposed = acceptance.proposed
        self.chances: list[tuple[float, ...]] = []
        while len(self.chances) < NUM_TOKENS:
            for chances, run in ((easy, acceptance.easy_run), (hard, acceptance.hard_run)):
                self.chances += [chances] * int(rng.geometric(1.0 / max(1.0, run)))
        del self.chances[NUM_TOKENS:]


def _chances(places: tuple[float, ...]) -> tuple[float, ...]:
    return (places + places[-1:] * _LONGEST_DRAFT)[:_LONGEST_DRAFT]
