"""Which of several heads drafts for a session: the one that was right most often for sessions that begin alike.

Requests of one kind share their beginning, a system prompt, and those of one tenant a salt. So what is known of a
session's heads is what they did for sessions with the same first tokens, the longer the better, over what they did for
all. A head is drawn with the probability that it is the best (Thompson, 1933; beta posteriors as in Chapelle and Li,
2011): heads that are not known yet, or hardly worse, are tried by themselves, and less with each try. The draft tokens
of one text are alike, so that n of them tell as much as n / (1 + (n - 1) rho) independent ones (Kish, 1965), where rho
is measured.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.shared.messages import SessionSpec
from outrider.shared.sampling_params import SpeculationMode

# tokens; beginnings that are told apart: each at most half longer than the one before it, as the text of the request
# itself comes behind a system prompt of any length
_BEGINNINGS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# beginnings; most that are remembered, those of about a hundred sessions that share none
_MOST_BEGINNINGS = 1024
# draft tokens; what all sessions, or those with a shorter beginning, weigh beside a beginning's own
_PRIOR_TOKENS = 6.0
# acceptance of a head before any draft, and its weight in draft tokens; published heads: 0.6 to 0.8
_FIRST_ACCEPTANCE, _FIRST_TOKENS = 0.7, 2.0
# intraclass correlation of the draft tokens of a session before any is known, the weight of that guess in sessions, and
# the memory of what is known; text that repeats itself has 0.4: a session then tells as much as three draft tokens
_FIRST_ALIKE, _ALIKE_SESSIONS, _ALIKE_MEMORY = 0.1, 8.0, 256.0
# ratio; what is known counts so much more in a draw. Simulated with four heads, one tries too much where texts are
# alike, and four settles for a wrong head where they differ much
_BOLDNESS = 2.0
# draft tokens; memory of a beginning: heads learn, and traffic turns
_MEMORY_TOKENS = 400.0

# (salt, first tokens)
_Key = tuple[str, tuple[int, ...]]


@dataclass
class _Drafts:
    """Draft tokens that were accepted, and drafts that ended with a wrong one, as of independent ones and decayed."""

    accepted: float = 0.0
    wrong: float = 0.0

    def add(self, num_accepted: float, num_wrong: float) -> None:
        keep = max(0.0, 1.0 - (num_accepted + num_wrong) / _MEMORY_TOKENS)
        self.accepted = keep * self.accepted + num_accepted
        self.wrong = keep * self.wrong + num_wrong


class HeadChoice:
    """Draws heads by name for sessions, and learns from how right their drafts were.

    Every step is linear in the number of heads; a session costs at most thirteen of them, whatever its prompt.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._random = random.Random(0)  # what is drawn changes no output
        self._drafts: OrderedDict[_Key, dict[str, _Drafts]] = OrderedDict()
        self._of_all: dict[str, _Drafts] = {}
        self._alike, self._num_alike = _FIRST_ALIKE, _ALIKE_SESSIONS

    def choose(self, spec: SessionSpec) -> str:
        """Draws the head of a new session."""
        known = self._known(spec)

        def draw(name: str) -> float:
            chance, weight = _acceptance(name, known)
            weight *= _BOLDNESS
            return self._random.betavariate(weight * chance + 1e-3, weight * (1.0 - chance) + 1e-3)

        return max(self._names, key=draw)

    def drop(self, name: str) -> None:
        """Never chooses it again; the last one stays."""
        if len(self._names) > 1:
            self._names = tuple(other for other in self._names if other != name)

    def observe(self, spec: SessionSpec, name: str, num_accepted: int, num_wrong: int) -> None:
        """Learns from a session that has ended, but from no seeded one in rejection mode.

        Its noise is a function of the request, so a choice that it had a part in would depend on the numbers that judge
        the same request's drafts (docs/correctness.md). A salt keeps sessions apart: nothing about heads is learned
        from them for others.
        """
        is_seeded = spec.sampling_params.seed is not None
        number = num_accepted + num_wrong
        if number == 0 or (is_seeded and spec.mode is SpeculationMode.REJECTION):
            return
        self._measure_alike(num_accepted / number, number, _acceptance(name, self._known(spec))[0])
        weight = 1.0 / (1.0 + (number - 1) * self._alike)
        if not spec.cache_salt:
            self._of_all.setdefault(name, _Drafts()).add(weight * num_accepted, weight * num_wrong)
        for key in _keys(spec):
            drafts = self._drafts.setdefault(key, {})
            self._drafts.move_to_end(key)
            drafts.setdefault(name, _Drafts()).add(weight * num_accepted, weight * num_wrong)
        while len(self._drafts) > _MOST_BEGINNINGS:
            self._drafts.popitem(last=False)

    def _known(self, spec: SessionSpec) -> list[dict[str, _Drafts]]:
        """Returns what is known of the heads, of all sessions first, of those with the longest beginning last."""
        return [self._of_all, *(self._drafts[key] for key in _keys(spec) if key in self._drafts)]

    def _measure_alike(self, share: float, number: int, expected: float) -> None:
        """share: accepted of the `number` draft tokens of a session, of which `expected` were expected."""
        variance = expected * (1.0 - expected)
        if number < 2 or variance < 1e-3:
            return
        found = ((share - expected) ** 2 / variance - 1.0 / number) / (1.0 - 1.0 / number)
        self._num_alike = min(self._num_alike + 1.0, _ALIKE_MEMORY)
        self._alike = min(1.0, max(0.0, self._alike + (found - self._alike) / self._num_alike))


def _acceptance(name: str, known: Sequence[dict[str, _Drafts]]) -> tuple[float, float]:
    """Returns the expected acceptance of a head, and the draft tokens that this is known from."""
    chance, weight = _FIRST_ACCEPTANCE, _FIRST_TOKENS
    for of_heads in known:
        drafts = of_heads.get(name, _Drafts())
        weight = min(weight, _PRIOR_TOKENS)
        total = weight + drafts.accepted + drafts.wrong
        chance, weight = (weight * chance + drafts.accepted) / total, total
    return chance, weight


def _keys(spec: SessionSpec) -> list[_Key]:
    """Returns what a session shares with those that begin alike, shortest first."""
    prompt = spec.prompt_token_ids
    lengths = [0, *_BEGINNINGS] if spec.cache_salt else _BEGINNINGS
    return [(spec.cache_salt, prompt[:length]) for length in lengths if length <= len(prompt)]
