"""How many tokens to draft next: as asked, or as many as pay.

The model of a round (Leviathan et al. 2023, eq. 1): with acceptance a, k draft tokens yield E(a, k) = (1 - a^(k+1)) /
(1 - a) tokens, at the cost of drafting k and of verifying k + 1 rows. All costs are measured on the running system,
the gateway's own overhead included, so "zero" wins wherever drafting does not pay.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

# Weight of the newest round; a change of load shows within about 20 rounds.
_COST_WEIGHT = 0.05
_ACCEPTANCE_WEIGHT = 0.1
# Tokens that a muted session decodes alone before it tries a short draft again.
MUTED_RUN = 48
_PROBE_LENGTH = 2
# Drafting must promise at least this much: a smaller gain is within the noise of the measured costs.
_MIN_GAIN = 0.03


class DraftPolicy(Protocol):
    """Contract: `num_draft_tokens` is asked before each round; 0 means decode alone for `free_run` tokens.

    `observe` is told of every round: how many tokens were drafted, how many of them accepted, how long it took.
    """

    def num_draft_tokens(self) -> int: ...

    def free_run(self) -> int: ...

    def observe(self, num_draft_tokens: int, num_accepted: int, num_emitted: int, seconds: float) -> None: ...


class FixedDraftLength:
    """Always the same length, as a request that names its method asks for."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    def free_run(self) -> int:
        return 1

    def observe(self, num_draft_tokens: int, num_accepted: int, num_emitted: int, seconds: float) -> None:
        pass


@dataclass
class RoundCosts:
    """Measured seconds of a round, shared by all sessions of one draft method at one gateway."""

    plain_s: float | None = None
    # Seconds that each draft token adds, drafting and verifying.
    per_token_s: float = 0.0
    acceptance: float = 0.7
    _by_length: dict[int, float] = field(default_factory=dict)

    def observe_plain(self, seconds: float) -> None:
        self.plain_s = _blend(self.plain_s, seconds, _COST_WEIGHT)

    def observe_draft(self, num_draft_tokens: int, seconds: float) -> None:
        self._by_length[num_draft_tokens] = _blend(self._by_length.get(num_draft_tokens), seconds, _COST_WEIGHT)
        if self.plain_s is None:
            return
        # A plain round is never dearer than one with drafts: when it seems so, its figure is out of date.
        self.plain_s = min(self.plain_s, _blend(self.plain_s, seconds, _COST_WEIGHT))
        extra = max(0.0, seconds - self.plain_s) / num_draft_tokens
        self.per_token_s = _blend(self.per_token_s, extra, _COST_WEIGHT)

    def seconds(self, num_draft_tokens: int) -> float | None:
        """Expected seconds of a round; None while nothing is known."""
        if num_draft_tokens == 0 or self.plain_s is None:
            return self.plain_s
        estimate = self.plain_s + self.per_token_s * num_draft_tokens
        return max(self.plain_s, self._by_length.get(num_draft_tokens, estimate))


class AdaptiveDraftLength:
    """The length with the most expected tokens per second; none at all where a plain step is better."""

    def __init__(self, costs: RoundCosts, max_draft_tokens: int) -> None:
        self._costs = costs
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = costs.acceptance
        self._muted = False

    def num_draft_tokens(self) -> int:
        plain = self._costs.plain_s
        if plain is None:
            return 0  # one plain run first: without its cost nothing can be compared
        best_length, best_rate = 0, (1.0 + _MIN_GAIN) / plain
        for length in range(1, self._max_draft_tokens + 1):
            seconds = self._costs.seconds(length)
            if seconds:
                rate = expected_tokens(self._acceptance, length) / seconds
                if rate > best_rate:
                    best_length, best_rate = length, rate
        if best_length:
            self._muted = False
            return best_length
        if self._muted:  # the run is over: one short probe shows whether drafting pays by now
            self._muted = False
            return min(_PROBE_LENGTH, self._max_draft_tokens)
        self._muted = True
        return 0

    def free_run(self) -> int:
        return MUTED_RUN if self._muted and self._costs.plain_s is not None else 4

    def observe(self, num_draft_tokens: int, num_accepted: int, num_emitted: int, seconds: float) -> None:
        if num_draft_tokens == 0:
            self._costs.observe_plain(seconds)
            return
        self._costs.observe_draft(num_draft_tokens, seconds)
        # Positions after the first rejection were not reached and say nothing.
        reached = min(num_draft_tokens, num_accepted + 1)
        for position in range(reached):
            hit = 1.0 if position < num_accepted else 0.0
            self._acceptance = _blend(self._acceptance, hit, _ACCEPTANCE_WEIGHT)
        self._costs.acceptance = _blend(self._costs.acceptance, num_accepted / reached, _COST_WEIGHT)


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """E(a, k), the bonus or corrected token included."""
    if acceptance >= 1.0:
        return num_draft_tokens + 1.0
    return float((1.0 - acceptance ** (num_draft_tokens + 1)) / (1.0 - acceptance))


def _blend(old: float | None, new: float, weight: float) -> float:
    return new if old is None else (1.0 - weight) * old + weight * new
