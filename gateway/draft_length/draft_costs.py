"""Cost model and acceptance estimator of one draft method, by which `auto` decides. Costs are counted in tokens.

The objective is goodput, not the latency of a round. At the best rate G, in tokens per second of the whole verifier,
the draft token at position i pays if it brings more tokens than its cost would bring elsewhere:

    s_i > G * (seconds that its row adds to the forward + seconds of drafting it),  s_i = P(the first i are accepted)

This maximises the ratio of tokens to seconds (Dinkelbach 1967) and ranks by survival as SmartSpec does (Liu et al.
2024). For one session among others G is their rate. The length for all sessions maximises the ratio itself, relative to
the rate without drafts. G and row prices come with every commit; costs of drafting and of the round trip are measured
at the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.gateway.draft_length.draft_policy import LateAnswer, RoundOutcome
from outrider.gateway.draft_length.local_draft_time import LocalDraftTime
from outrider.gateway.draft_length.position_acceptance import PositionAcceptance
from outrider.gateway.draft_length.running_means import blend, robust
from outrider.gateway.draft_length.shorter_drafts import num_shorter_rounds
from outrider.gateway.draft_length.verifier_load import VerifierLoad

# weights of the newest cost: per round, for a mean of about 20; at most, for a draft after many rounds; 56f2224
_COST_WEIGHT, _RARE_WEIGHT = 0.05, 0.3
# exponential forgetting of acceptance: per round, and its lower bound per draft; docs/log.md: 56f2224
_DECAY, _RARE_DECAY = 0.98, 0.85
# acceptance and s; beliefs before the first draft; b7efff9, 0487296
_PRIOR_ACCEPTANCE, _PRIOR_OVERHEAD_S = 0.7, 0.001
# draft tokens; weight of the prior acceptance; b7efff9
_PRIOR_TOKENS = 10.0
# shares of the best speed-up: the shortest length with the first is chosen, and stays while it has the second; 645118f
_AS_GOOD, _STILL_AS_GOOD = 0.99, 0.975
# tokens over all sessions; gap between probes while drafting loses; doubles per probe; 0487296
_PROBE_GAP = 48
# tokens per session in a batch; longest such gap: a probe delays all sessions; 0487296
_LONGEST_PROBE_GAP = 768


@dataclass
class MethodCosts:
    """Of one draft method, over all sessions of a gateway at one verifier."""

    # Seconds of drafting per position, for all sessions of a batch together; None: nothing drafted yet.
    position_s: float | None = None
    # Seconds of a round beyond drafting and the verifier.
    overhead_s: float = _PRIOR_OVERHEAD_S
    # Draft tokens accepted, and reached (up to the first rejection); the ratio of the sums is the unbiased acceptance.
    num_accepted: float = _PRIOR_ACCEPTANCE * _PRIOR_TOKENS
    num_reached: float = _PRIOR_TOKENS
    positions: PositionAcceptance = field(default_factory=PositionAcceptance)
    # Share of the requested tokens that are proposed, in drafts of positions.drafted_length; n-grams often find none.
    proposed: float = 1.0
    # Tokens over all sessions until the next probe while drafting loses, and the gap after it.
    tokens_until_probe: int = _PROBE_GAP
    probe_gap: int = _PROBE_GAP
    # Of local drafting; None: a drafter service drafts.
    local_time: LocalDraftTime | None = None
    # The length last chosen for all sessions; 0: none yet.
    settled_length: int = 0
    # Tokens over all sessions since probe_gap was halved.
    _tokens_since_halved: int = 0
    # Rounds since the last draft of the verifier's batch, and since the last draft that a session asked for.
    _rounds_since_draft: float = 0.0
    _rounds_since_own: float = 0.0
    # Of the newest answer; None: no answer yet, so overhead_s is the prior.
    _last_overhead_s: float | None = None
    _last_position_s: float | None = None
    # Whether all answers so far had to catch up first; what they took is replaced by the first other one.
    _only_caught_up: bool = True

    @property
    def is_known(self) -> bool:
        """Whether it has answered, be it without a draft."""
        return self.position_s is not None or self._last_overhead_s is not None

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_reached

    def observe(self, outcome: RoundOutcome) -> None:
        """Learns from a round, with or without a draft, of a session that uses this method."""
        self.tokens_until_probe -= 1 + outcome.num_accepted
        self._tokens_since_halved += 1 + outcome.num_accepted
        share = 1.0 / max(1, outcome.batch_sessions)  # of a round, which every session in it reports
        self._rounds_since_draft += share
        self._rounds_since_own += share
        if outcome.draft_depth:
            self._learn_local(outcome)
        else:
            if outcome.num_asked:  # a drafter service was asked
                self.local_time = None
            self.learn(outcome, may_be_ahead=outcome.may_be_ahead)
        if outcome.num_beyond_end and outcome.num_accepted == outcome.num_draft_tokens == outcome.num_asked:
            self._learn_end(outcome)

    def _learn_local(self, outcome: RoundOutcome) -> None:
        """Every session of the batch reports the same drafting time."""
        local_time = None if self._only_caught_up and not outcome.is_catch_up else self.local_time
        self._only_caught_up &= outcome.is_catch_up
        if local_time is None or not outcome.is_catch_up:
            self.local_time = local_time or LocalDraftTime()
            self.local_time.observe(outcome.draft_depth, outcome.draft_s, _weight(self._rounds_since_draft))
            self._rounds_since_draft = 0.0
            self.overhead_s, self.position_s = self.local_time.first_s, self.local_time.token_s
            self._last_overhead_s, self._last_position_s = self.overhead_s, self.position_s
        if outcome.num_asked and not outcome.is_catch_up:
            self._learn_proposed(outcome, _weight(self._rounds_since_own))
        self._learn_acceptance(outcome)

    def learn(self, outcome: RoundOutcome | LateAnswer, *, may_be_ahead: bool = False) -> None:
        """Learns cost and acceptance from a drafter's answer, in time or late."""
        weight = _RARE_WEIGHT if isinstance(outcome, LateAnswer) else _weight(max(1.0, self._rounds_since_own))
        if outcome.num_asked and self._only_caught_up and not outcome.is_catch_up:
            self._only_caught_up, self._last_overhead_s, self._last_position_s = False, None, None
        if outcome.num_asked and (not outcome.is_catch_up or self._last_overhead_s is None):
            if may_be_ahead and self._last_overhead_s is not None:  # two kinds of rounds: their mean counts
                self.overhead_s = blend(self.overhead_s, outcome.overhead_s, _COST_WEIGHT)
            else:
                self.overhead_s = robust(self.overhead_s, outcome.overhead_s, self._last_overhead_s, weight)
            self._last_overhead_s = outcome.overhead_s
            self._learn_proposed(outcome, _COST_WEIGHT)
        if outcome.num_draft_tokens:
            position_s = outcome.draft_s / outcome.num_draft_tokens
            if not outcome.is_catch_up or self.position_s is None:
                self.position_s = robust(self.position_s, position_s, self._last_position_s, weight)
                self._last_position_s = position_s
        self._learn_acceptance(outcome)

    def _learn_proposed(self, outcome: RoundOutcome | LateAnswer, weight: float) -> None:
        """Converts the share of a shorter draft to drafts of drafted_length: tokens that a method proposes take several
        shorter rounds, but finding none takes one round at any length.
        """
        missing = 1.0 - outcome.num_draft_tokens / outcome.num_asked
        if num_wanted(outcome) < self.positions.drafted_length:
            survival = self._survival(self.acceptance, self.positions.drafted_length)
            missing *= num_shorter_rounds(survival, num_wanted(outcome), self.acceptance)
        self.proposed = max(0.0, blend(self.proposed, 1.0 - missing, weight))

    def _learn_acceptance(self, outcome: RoundOutcome | LateAnswer) -> None:
        """Exponential forgetting per round (_DECAY), bounded below per draft (_RARE_DECAY). Not per report, as every
        session of a batch reports the same round (docs/log.md: 56f2224).
        """
        if outcome.num_draft_tokens:
            decay = max(_RARE_DECAY, _DECAY**self._rounds_since_own)
            self.num_accepted = decay * self.num_accepted + outcome.num_accepted
            self.num_reached = decay * self.num_reached + num_reached(outcome)
            reached, wanted = num_reached(outcome), num_wanted(outcome)
            self.positions.observe(outcome.num_accepted, reached, wanted, self.acceptance, decay)
        if outcome.num_asked:
            self._rounds_since_own = 0.0

    def _learn_end(self, outcome: RoundOutcome) -> None:
        """A fully accepted draft at the end of the output: the next position brings nothing, so it counts as rejected.
        Otherwise requests of 64 tokens would bring 5 % less than predicted.
        """
        num_reached_more = 1.0 if outcome.num_asked else self.proposed
        self.num_reached += num_reached_more
        self.positions.observe_end(outcome.num_accepted, num_wanted(outcome), num_reached_more * self.acceptance)

    def expected_s(self, num_draft_tokens: int) -> float | None:
        """Seconds from asking for num_draft_tokens to the answer; None before the first answer."""
        if self._last_overhead_s is None:
            return None
        return self.overhead_s + num_draft_tokens * (self.position_s or 0.0)

    def longest_within(self, load: VerifierLoad, round_s: float, max_draft_tokens: int) -> int:
        """The longest draft with which a round takes at most `round_s`; 0: none."""
        lengths = range(max_draft_tokens, 0, -1)
        return next((n for n in lengths if load.step_s(n) + (self.expected_s(n) or 0.0) <= round_s), 0)

    def gain(
        self, load: VerifierLoad, acceptance: float, num_draft_tokens: int, *, with_round_trip: bool = True
    ) -> float:
        """Tokens that a round with num_draft_tokens brings beyond a round without drafts, costs subtracted.

        with_round_trip: all costs of drafting; without: the marginal costs of one session when the others draft.
        """
        tokens, plain_rounds = self._tokens_and_rounds(load, acceptance, num_draft_tokens, with_round_trip)
        return tokens - plain_rounds

    def best_gain(
        self, load: VerifierLoad, acceptance: float, max_draft_tokens: int, *, with_round_trip: bool = True
    ) -> tuple[float, int]:
        """The largest gain and its length; (0, 0) if max_draft_tokens is 0."""
        gains = (
            (self.gain(load, acceptance, length, with_round_trip=with_round_trip), length)
            for length in range(1, max_draft_tokens + 1)
        )
        return max(gains, default=(0.0, 0), key=lambda entry: entry[0])

    def settled_gain(self, load: VerifierLoad, max_draft_tokens: int) -> tuple[float, int]:
        """Gain and length for all sessions: the shortest length with _AS_GOOD of the best speed-up. load: with the rate
        of plain decoding.

        It stays while it has _STILL_AS_GOOD, as a batch of mixed lengths takes as long to draft as its longest (16
        sessions: one length of 3 brought 1.05 of lengths from 3 to 5).
        """
        if max_draft_tokens <= 0:
            return 0.0, 0
        speedups = {length: self.speedup(load, length) for length in range(1, max_draft_tokens + 1)}
        best = max(speedups.values())
        length = next(length for length, speedup in speedups.items() if speedup >= _AS_GOOD * best)
        if speedups.get(self.settled_length, 0.0) >= _STILL_AS_GOOD * best:
            length = self.settled_length
        elif self.settled_length <= max_draft_tokens:  # a request with a lower limit decides for itself only
            self.settled_length = length
        return self.gain(load, self.acceptance, length), length

    def speedup(self, load: VerifierLoad, num_draft_tokens: int) -> float:
        """Ratio of tokens per second, all sessions drafting num_draft_tokens, to the load's rate."""
        tokens, plain_rounds = self._tokens_and_rounds(load, self.acceptance, num_draft_tokens, with_round_trip=True)
        return tokens / plain_rounds

    def _tokens_and_rounds(
        self, load: VerifierLoad, acceptance: float, num_draft_tokens: int, with_round_trip: bool
    ) -> tuple[float, float]:
        """Tokens of a session's round with drafts, and its duration in rounds without drafts."""
        # Delay in units of the tokens that a session decodes without drafts meanwhile.
        own_rate = (load.tokens_per_s or 0.0) / load.batch_sessions
        tokens, num_proposed = self.round_yield(acceptance, num_draft_tokens)
        proposed = num_proposed / max(1, num_draft_tokens)
        delay_s = num_draft_tokens * (self.position_s or 0.0)
        if with_round_trip:
            delay_s += self.overhead_s + load.proposals_s(num_draft_tokens, proposed)
        else:
            if self.local_time is not None:
                delay_s = 0.0  # a further session in the drafted batch adds no time
            delay_s += load.further_proposals_s(num_draft_tokens, proposed)
        return tokens, 1.0 + own_rate * delay_s

    def round_yield(self, acceptance: float, num_draft_tokens: int) -> tuple[float, float]:
        """Expected tokens of a session's round, and draft tokens proposed for it, if it asks for num_draft_tokens."""
        survival = self._survival(acceptance, max(num_draft_tokens, self.positions.drafted_length))
        num_rounds = num_shorter_rounds(survival, num_draft_tokens, acceptance)
        missing = (1.0 - self.proposed) / num_rounds
        return (1.0 + sum(survival)) / num_rounds, (1.0 - missing) * num_draft_tokens

    def _survival(self, acceptance: float, num_draft_tokens: int) -> list[float]:
        """Probabilities that the first 1, 2, ... are all proposed and accepted."""
        return [self.proposed * chance for chance in self.positions.survival(acceptance, num_draft_tokens)]

    def takes_probe(self, load: VerifierLoad) -> bool:
        """Whether a session may probe now although drafting loses; if so, the gap doubles."""
        if self.tokens_until_probe > 0:
            return False
        self.tokens_until_probe = self.probe_gap
        self.probe_gap = min(2 * self.probe_gap, round(_LONGEST_PROBE_GAP * load.batch_sessions))
        return True

    def pays_again(self, load: VerifierLoad) -> None:
        """Drafting seems to pay: halves the gap once per _PROBE_GAP tokens of each session. Not a reset: between two
        bursts drafting seems to pay for a moment (docs/log.md: 84d22f5).
        """
        if self._tokens_since_halved >= _PROBE_GAP * load.batch_sessions:
            self.probe_gap = max(_PROBE_GAP, self.probe_gap // 2)
            self._tokens_since_halved = 0


def _weight(num_rounds: float) -> float:
    """Weight in a mean over rounds of a value that comes num_rounds after the one before."""
    return float(min(_RARE_WEIGHT, 1.0 - (1.0 - _COST_WEIGHT) ** num_rounds))


def num_reached(outcome: RoundOutcome | LateAnswer) -> int:
    """Draft tokens up to and with the first rejection; those after it are not evaluated."""
    return min(outcome.num_draft_tokens, outcome.num_accepted + 1)


def num_wanted(outcome: RoundOutcome | LateAnswer) -> int:
    """Draft tokens requested, as if the output did not end."""
    return outcome.num_asked + (outcome.num_beyond_end if isinstance(outcome, RoundOutcome) else 0)
