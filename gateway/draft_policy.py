"""How many tokens to draft next: as asked, or as many as pay.

Goodput, not latency of one round: at the best rate G (tokens a second of the whole verifier) a draft token at position
i is worth its place if the tokens it brings exceed what its cost would bring elsewhere,

    s_i > G * (seconds of one more row in the forward + seconds of drafting it),        s_i = chance that i are accepted

which is the condition for the largest ratio of tokens to seconds (Dinkelbach 1967; the same ranking by survival as
SmartSpec, Liu et al. 2024). G and the cost of a row come with every commit, from the verifier's own measurements; the
costs of drafting and of the round trip are measured here. So "zero" wins wherever drafting does not pay, at any load.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

# A change of load shows within about 20 rounds.
_COST_WEIGHT = 0.05
_ACCEPTANCE_WEIGHT = 0.1
# Tokens that a muted session decodes alone before it tries a short draft again; twice as many after each failure.
MUTED_RUN = 48
_LONGEST_MUTED_RUN = 768
_PROBE_LENGTH = 2
# Tokens a round with a draft must promise beyond a plain one: smaller gains are within the noise of the costs.
_MIN_GAIN = 0.05
# Without any draft known a session begins with this acceptance.
_PRIOR_ACCEPTANCE = 0.7


@dataclass(frozen=True)
class RoundOutcome:
    """One round as the gateway saw it."""

    # Tokens asked of the drafter (0: it was not asked), proposed and accepted.
    num_asked: int
    num_draft_tokens: int
    num_accepted: int
    # Of the verifier's commit (messages.Timings).
    batch_sessions: int
    marginal_row_s: float
    tokens_per_s: float
    # The drafter's own time for the proposal, and what the round took beyond both services' work.
    draft_s: float
    overhead_s: float


class DraftPolicy(Protocol):
    """Contract: `num_draft_tokens` is asked before each round; 0 means decode alone for `free_run` tokens.

    `observe` is told of every round.
    """

    def num_draft_tokens(self) -> int: ...

    def free_run(self) -> int: ...

    def observe(self, outcome: RoundOutcome) -> None: ...


class FixedDraftLength:
    """Always the same length, as a request that names its method asks for."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._num_draft_tokens = num_draft_tokens

    def num_draft_tokens(self) -> int:
        return self._num_draft_tokens

    def free_run(self) -> int:
        return 1

    def observe(self, outcome: RoundOutcome) -> None:
        pass


@dataclass
class RoundCosts:
    """What drafting costs and brings, shared by all sessions of one method at one gateway."""

    tokens_per_s: float | None = None
    marginal_row_s: float = 0.0
    batch_sessions: float = 1.0
    # Seconds that drafting takes per position, for all sessions of a batch together.
    position_s: float = 0.0
    overhead_s: float | None = None
    acceptance: float = _PRIOR_ACCEPTANCE
    # Share of the tokens asked for that were proposed at all: n-grams often find nothing.
    proposed: float = 1.0

    def observe(self, outcome: RoundOutcome) -> None:
        self.tokens_per_s = outcome.tokens_per_s  # smoothed by the verifier already
        self.marginal_row_s = outcome.marginal_row_s
        self.batch_sessions = blend(self.batch_sessions, max(1, outcome.batch_sessions), _COST_WEIGHT)
        if outcome.num_asked:
            self.overhead_s = blend(self.overhead_s, outcome.overhead_s, _COST_WEIGHT)
            self.proposed = blend(self.proposed, outcome.num_draft_tokens / outcome.num_asked, _COST_WEIGHT)
        if outcome.num_draft_tokens:
            self.position_s = blend(self.position_s or None, outcome.draft_s / outcome.num_draft_tokens, _COST_WEIGHT)

    def gain(self, acceptance: float, num_draft_tokens: int) -> float:
        """Tokens that a round with so many draft tokens brings beyond a plain round, its costs counted in tokens."""
        rate = self.tokens_per_s or 0.0
        # A draft's delay holds up its own session's share of the tokens; a row holds up everybody.
        own_rate = rate / self.batch_sessions
        survival, accepted = 1.0, 0.0
        for _position in range(num_draft_tokens):
            survival *= acceptance
            accepted += survival - rate * self.marginal_row_s
        delay_s = num_draft_tokens * self.position_s + (self.overhead_s or 0.0)
        return self.proposed * accepted - own_rate * delay_s


class AdaptiveDraftLength:
    """The length with the largest gain; none at all where a plain step is better."""

    def __init__(self, costs: RoundCosts, max_draft_tokens: int) -> None:
        self._costs = costs
        self._max_draft_tokens = max_draft_tokens
        self._acceptance = costs.acceptance
        self._muted = False
        self._muted_run = MUTED_RUN

    def num_draft_tokens(self) -> int:
        gains = [(self._costs.gain(self._acceptance, k), k) for k in range(1, self._max_draft_tokens + 1)]
        gain, length = max(gains, default=(0.0, 0))
        if gain > _MIN_GAIN:
            self._muted, self._muted_run = False, MUTED_RUN
            return length
        if self._muted:  # the run is over: one short probe shows whether drafting pays by now
            self._muted = False
            self._muted_run = min(2 * self._muted_run, _LONGEST_MUTED_RUN)
            return min(_PROBE_LENGTH, self._max_draft_tokens)
        self._muted = True
        return 0

    def free_run(self) -> int:
        return self._muted_run if self._muted else 1

    def observe(self, outcome: RoundOutcome) -> None:
        self._costs.observe(outcome)
        if not outcome.num_draft_tokens:
            return
        # Positions after the first rejection were not reached and say nothing.
        reached = min(outcome.num_draft_tokens, outcome.num_accepted + 1)
        for position in range(reached):
            hit = 1.0 if position < outcome.num_accepted else 0.0
            self._acceptance = blend(self._acceptance, hit, _ACCEPTANCE_WEIGHT)
        self._costs.acceptance = blend(self._costs.acceptance, outcome.num_accepted / reached, _COST_WEIGHT)


def blend(old: float | None, new: float, weight: float) -> float:
    """The old value moved towards the new one by `weight`; the new one where there is none."""
    return new if old is None else (1.0 - weight) * old + weight * new
