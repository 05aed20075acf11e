"""Acceptance of one method's drafts: how many tokens a round with k draft tokens brings.

Per draft position with an exponential memory, towards the mean over positions where few were measured. When the newest
drafts contradict the memory, most of it is dropped: text that is easy to draft comes in stretches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from outrider.verifier_service.draft_length.limits import (
    ACCEPTANCE_MEMORY,
    CHANGE_ERRORS,
    PRIOR_ACCEPTANCE,
    PRIOR_TOKENS,
    RECENT_DRAFTS,
)


@dataclass
class _Counts:
    """Counts of drafts, decayed.

    accepted, reached: by position, draft tokens accepted, and verified after an accepted prefix. asked, found: drafts
    asked for, and those that the method had a proposal for.
    """

    accepted: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)
    asked: float = 0.0
    found: float = 0.0

    def observe(self, drafts: Sequence[tuple[int, int]], num_asked: int, memory: float) -> None:
        """Adds one round, and lets older drafts decay with a memory of `memory` drafts."""
        keep = max(0.0, 1.0 - num_asked / memory)
        self.asked = keep * self.asked + num_asked
        self.found = keep * self.found + len(drafts)
        self.accepted = [keep * number for number in self.accepted]
        self.reached = [keep * number for number in self.reached]
        for accepted, proposed in drafts:
            for position in range(min(proposed, accepted + 1)):
                if position == len(self.accepted):
                    self.accepted.append(0.0)
                    self.reached.append(0.0)
                self.accepted[position] += position < accepted
                self.reached[position] += 1.0

    def copy(self) -> _Counts:
        return _Counts(list(self.accepted), list(self.reached), self.asked, self.found)


@dataclass
class Acceptance:
    """The acceptance estimator of one method's drafts.

    error, variance: accepted tokens of the newest drafts in excess of the expected ones, and the mean square of that
    excess per draft.
    """

    _counts: _Counts = field(default_factory=_Counts)
    _recent: _Counts = field(default_factory=_Counts)
    _error: float = 0.0
    _variance: float = 1.0

    @property
    def is_known(self) -> bool:
        return self._counts.asked > 0.0

    @property
    def proposed(self) -> float:
        """Share of rounds in which a draft is found; 1 before any."""
        return (self._counts.found + 1.0) / (self._counts.asked + 1.0)

    def observe(self, drafts: Sequence[tuple[int, int]], num_asked: int, length: int) -> None:
        """Learns from a round.

        drafts: (accepted, proposed) of each proposal. num_asked: sessions that asked for `length`.
        """
        error = sum(accepted for accepted, _ in drafts) - num_asked * (self.tokens(length)[length] - 1.0)
        self._counts.observe(drafts, num_asked, ACCEPTANCE_MEMORY)
        self._recent.observe(drafts, num_asked, RECENT_DRAFTS)
        self._error = max(0.0, 1.0 - num_asked / RECENT_DRAFTS) * self._error + error
        bound = CHANGE_ERRORS * math.sqrt(self._variance * self._recent.asked)
        self._variance += min(1.0, num_asked / ACCEPTANCE_MEMORY) * (error * error / num_asked - self._variance)
        if abs(self._error) > bound:
            self._counts, self._error = self._recent.copy(), 0.0

    def begin(self) -> None:
        """Forgets the recent drafts, as drafting begins again after a pause."""
        self._recent, self._error = _Counts(), 0.0

    def tokens(self, most: int, errors: float = 0.0) -> list[float]:
        """Expected tokens of a round by draft length, 0 to `most`. errors: standard errors added: an upper bound."""
        counts, proposed = self._counts, self.proposed
        reached = sum(counts.reached) + PRIOR_TOKENS
        mean = (sum(counts.accepted) + PRIOR_TOKENS * PRIOR_ACCEPTANCE) / reached
        chances = []
        for position in range(most):
            known = position < len(counts.accepted)
            weight = (counts.reached[position] if known else 0.0) + PRIOR_TOKENS
            chance = ((counts.accepted[position] if known else 0.0) + PRIOR_TOKENS * mean) / weight
            if errors:
                chance = min(1.0, chance + errors * math.sqrt(chance * (1.0 - chance) / weight))
            chances.append(chance)
        if errors:
            proposed = min(1.0, proposed + errors * math.sqrt(proposed * (1.0 - proposed) / (counts.asked + 1.0)))
        return [1.0, *(1.0 + proposed * tokens for tokens in accumulate(accumulate(chances, mul)))]
