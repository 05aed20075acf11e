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
# One round that took longer than so many times the usual tells of a hiccup, not of the costs.
_OUTLIER = 3.0
# Rounds are forgotten at these rates: by all sessions together, and by a session itself.
_SHARED_DECAY = 0.98
_PROBE_DECAY = 0.85
_OWN_DECAY = 0.95
# Positions of other sessions that a session believes as much as its own.
_PRIOR_POSITIONS = 8.0
# Tokens that a muted session decodes alone before it looks again.
MUTED_RUN = 48
# Tokens of all sessions between two short probes while drafting does not pay; twice as many after each that fails.
_PROBE_GAP = 48
_LONGEST_PROBE_GAP = 768
_PROBE_LENGTH = 2
# Tokens a round with a draft must promise beyond a plain one: smaller gains are within the noise of the costs.
_MIN_GAIN = 0.02
# What is believed before anything is known.
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_OVERHEAD_S = 0.001


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
    # Seconds that drafting takes per position, for all sessions of a batch together; None: nothing drafted yet.
    position_s: float | None = None
    overhead_s: float = _PRIOR_OVERHEAD_S
    # Draft tokens accepted of those that were looked at: the ratio of the sums is the acceptance, without bias.
    num_accepted: float = _PRIOR_ACCEPTANCE * 10
    num_reached: float = 10.0
    # Share of the tokens asked for that were proposed at all: n-grams often find nothing.
    proposed: float = 1.0
    # Tokens of all sessions until one may try a short draft although it does not seem to pay.
    tokens_until_probe: int = _PROBE_GAP
    probe_gap: int = _PROBE_GAP

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_reached

    def observe(self, outcome: RoundOutcome) -> None:
        self.tokens_per_s = outcome.tokens_per_s  # smoothed by the verifier already
        self.marginal_row_s = outcome.marginal_row_s
        self.batch_sessions = blend(self.batch_sessions, max(1, outcome.batch_sessions), _COST_WEIGHT)
        self.tokens_until_probe -= 1 + outcome.num_accepted
        if outcome.num_asked:
            overhead_s = min(outcome.overhead_s, _OUTLIER * self.overhead_s)
            self.overhead_s = blend(self.overhead_s, overhead_s, _COST_WEIGHT)
            self.proposed = blend(self.proposed, outcome.num_draft_tokens / outcome.num_asked, _COST_WEIGHT)
        if outcome.num_draft_tokens:
            position_s = outcome.draft_s / outcome.num_draft_tokens
            if self.position_s is not None:
                position_s = min(position_s, _OUTLIER * self.position_s + 1e-4)
            self.position_s = blend(self.position_s, position_s, _COST_WEIGHT)
            # Probes are few; each has to count for more, or what was once bad would stay so.
            decay = _SHARED_DECAY if self.probe_gap == _PROBE_GAP else _PROBE_DECAY
            self.num_accepted = decay * self.num_accepted + outcome.num_accepted
            self.num_reached = decay * self.num_reached + num_reached(outcome)

    def gain(self, acceptance: float, num_draft_tokens: int, *, with_round_trip: bool = True) -> float:
        """Tokens that a round with so many draft tokens brings beyond a plain round, its costs counted in tokens."""
        rate = self.tokens_per_s or 0.0
        # A draft's delay holds up its own session's share of the tokens; a row holds up everybody.
        own_rate = rate / self.batch_sessions
        survival, accepted = 1.0, 0.0
        for _position in range(num_draft_tokens):
            survival *= acceptance
            accepted += survival - rate * self.marginal_row_s
        delay_s = num_draft_tokens * (self.position_s or 0.0) + (self.overhead_s if with_round_trip else 0.0)
        return self.proposed * accepted - own_rate * delay_s

    def takes_probe(self) -> bool:
        """Whether a session for which drafting does not seem to pay may try once."""
        if self.tokens_until_probe > 0:
            return False
        self.tokens_until_probe = self.probe_gap
        self.probe_gap = min(2 * self.probe_gap, _LONGEST_PROBE_GAP)
        return True


class AdaptiveDraftLength:
    """The length with the largest gain; none at all where a plain step is better."""

    def __init__(self, costs: RoundCosts, max_draft_tokens: int) -> None:
        self._costs = costs
        self._max_draft_tokens = max_draft_tokens
        self._num_accepted = 0.0
        self._num_reached = 0.0

    @property
    def acceptance(self) -> float:
        """Its own, as far as it has seen any, else that of all."""
        accepted = self._num_accepted + _PRIOR_POSITIONS * self._costs.acceptance
        return accepted / (self._num_reached + _PRIOR_POSITIONS)

    def num_draft_tokens(self) -> int:
        costs = self._costs
        # Whether to draft, and how many tokens at most, is settled for all sessions alike: a forward waits for those
        # who draft, and when only some do, or one drafts longer, all pay for the waiting. How many of them, none
        # included, is then a session's own affair.
        gains = [(costs.gain(costs.acceptance, k), k) for k in range(1, self._max_draft_tokens + 1)]
        gain, longest = max(gains, default=(0.0, 0), key=lambda entry: entry[0])
        if gain > _MIN_GAIN:
            own = [(costs.gain(self.acceptance, k, with_round_trip=False), k) for k in range(1, longest + 1)]
            gain, length = max(own, key=lambda entry: entry[0])
            if gain > 0.0:
                costs.probe_gap = _PROBE_GAP
                return length
        return min(_PROBE_LENGTH, self._max_draft_tokens) if costs.takes_probe() else 0

    def free_run(self) -> int:
        return MUTED_RUN

    def observe(self, outcome: RoundOutcome) -> None:
        self._costs.observe(outcome)
        if outcome.num_draft_tokens:
            self._num_accepted = _OWN_DECAY * self._num_accepted + outcome.num_accepted
            self._num_reached = _OWN_DECAY * self._num_reached + num_reached(outcome)


def num_reached(outcome: RoundOutcome) -> int:
    """Draft tokens that the target looked at: those after the first rejection say nothing."""
    return min(outcome.num_draft_tokens, outcome.num_accepted + 1)


def blend(old: float | None, new: float, weight: float) -> float:
    """The old value moved towards the new one by `weight`; the new one where there is none."""
    return new if old is None else (1.0 - weight) * old + weight * new
