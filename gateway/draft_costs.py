"""What drafting costs and brings, counted in tokens: the figures that `auto` decides by.

Goodput, not latency of one round: at the best rate G (tokens a second of the whole verifier) a draft token at position
i is worth its place if the tokens it brings exceed what its cost would bring elsewhere,

    s_i > G * (seconds that its row adds to the forward + seconds of drafting it),      s_i = chance that i are accepted

which is the condition for the largest ratio of tokens to seconds (Dinkelbach 1967; the same ranking by survival as
SmartSpec, Liu et al. 2024). For a session beside others G is the rate that they have; how many tokens all of them draft
at most is chosen by the ratio itself, from the rate without drafts (with that one as G, too many: 5 for 3). G and the
prices of rows come with every commit, from the verifier's own measurements; the costs of drafting and of the round trip
are measured at the gateway.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gateway.draft_policy import LateAnswer, RoundOutcome
from gateway.local_draft_time import LocalDraftTime
from gateway.place_acceptance import PlaceAcceptance
from gateway.running_means import blend, robust
from gateway.shorter_drafts import num_shorter_rounds
from gateway.verifier_load import VerifierLoad

# A change of load shows within about 20 rounds, or after a few drafts where these are rare.
_COST_WEIGHT = 0.05
_RARE_WEIGHT = 0.3
# A round, whether it had drafts or not, leaves so much of what was known before; a single draft no less than the other.
_DECAY = 0.98
_RARE_DECAY = 0.85
# What is believed before anything is known.
_PRIOR_ACCEPTANCE = 0.7
_PRIOR_OVERHEAD_S = 0.001
# The shortest length is drafted that brings at least so much of the best, and stays for as long as it brings the other.
# With 0.98 and 0.95 16 sessions stayed at two tokens where three were held for 3 % better and were 5 % better.
_AS_GOOD = 0.99
_STILL_AS_GOOD = 0.975
# Tokens of all sessions between two short probes while drafting does not pay; twice as many after each that fails, half
# as many again for every so many tokens of each session while it pays. The longest pause is per session in a batch: a
# probe holds up all of them, and opens a session at the drafter.
_PROBE_GAP = 48
_LONGEST_PROBE_GAP = 768


@dataclass
class MethodCosts:
    """One draft method's, over all sessions of a gateway."""

    # Seconds that drafting takes per position, for all sessions of a batch together; None: nothing drafted yet.
    position_s: float | None = None
    overhead_s: float = _PRIOR_OVERHEAD_S
    # Draft tokens accepted of those that were looked at: the ratio of the sums is the acceptance, without bias.
    num_accepted: float = _PRIOR_ACCEPTANCE * 10
    num_reached: float = 10.0
    places: PlaceAcceptance = field(default_factory=PlaceAcceptance)
    # Share of the tokens asked for that were proposed at all: n-grams often find nothing. Of drafts as long as the
    # places are known from.
    proposed: float = 1.0
    # Tokens of all sessions until one may try a short draft although it does not seem to pay.
    tokens_until_probe: int = _PROBE_GAP
    probe_gap: int = _PROBE_GAP
    # What a verifier that drafts by itself takes, for all sessions of a batch together; None: somebody else drafts.
    local_time: LocalDraftTime | None = None
    # What the sessions that draft were last told to draft at most; 0: nothing yet.
    settled_length: int = 0
    # Tokens of all sessions since the pause between probes was halved.
    _tokens_since_halved: int = 0
    # Rounds since one with a draft, of whichever session of the verifier, and since one that a session told of its own.
    _rounds_since_draft: float = 0.0
    _rounds_since_own: float = 0.0
    # Of the newest answer; None: there was none yet, and overhead_s is a belief.
    _last_overhead_s: float | None = None
    _last_position_s: float | None = None

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_reached

    def observe(self, outcome: RoundOutcome) -> None:
        """A round of a session that drafts by this method, whether it has been asked or not."""
        self.tokens_until_probe -= 1 + outcome.num_accepted
        self._tokens_since_halved += 1 + outcome.num_accepted
        share = 1.0 / max(1, outcome.batch_sessions)  # of a round, which every session in it reports
        self._rounds_since_draft += share
        self._rounds_since_own += share
        if outcome.draft_depth:
            self._learn_local(outcome)
        else:
            if outcome.num_asked:  # of somebody else than the verifier
                self.local_time = None
            self.learn(outcome, may_be_ahead=outcome.may_be_ahead)
        if outcome.num_beyond_end and outcome.num_accepted == outcome.num_draft_tokens == outcome.num_asked:
            self._learn_end(outcome)

    def _learn_local(self, outcome: RoundOutcome) -> None:
        """Every session of the batch tells of the one draft that was made for all."""
        is_first = self.local_time is None
        self.local_time = self.local_time or LocalDraftTime()
        if is_first or not outcome.is_catch_up:
            self.local_time.observe(outcome.draft_depth, outcome.draft_s, _weight(self._rounds_since_draft))
            self._rounds_since_draft = 0.0
            self.overhead_s, self.position_s = self.local_time.first_s, self.local_time.token_s
            self._last_overhead_s, self._last_position_s = self.overhead_s, self.position_s
        if outcome.num_asked and not outcome.is_catch_up:
            self._learn_proposed(outcome, _weight(self._rounds_since_own))
        self._learn_acceptance(outcome)

    def learn(self, outcome: RoundOutcome | LateAnswer, *, may_be_ahead: bool = False) -> None:
        """What a drafter's answer cost, whether its round waited for it or not, and how good it was."""
        weight = _RARE_WEIGHT if isinstance(outcome, LateAnswer) else _weight(max(1.0, self._rounds_since_own))
        if outcome.num_asked and (not outcome.is_catch_up or self._last_overhead_s is None):
            if may_be_ahead and self._last_overhead_s is not None:  # the mean over both kinds is what counts
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
        """Where nothing is found there is one round, however long drafts are; where much is found shorter ones make
        more."""
        missing = 1.0 - outcome.num_draft_tokens / outcome.num_asked
        if num_wanted(outcome) < self.places.drafted_length:
            survival = self._survival(self.acceptance, self.places.drafted_length)
            missing *= num_shorter_rounds(survival, num_wanted(outcome), self.acceptance)
        self.proposed = max(0.0, blend(self.proposed, 1.0 - missing, weight))

    def _learn_acceptance(self, outcome: RoundOutcome | LateAnswer) -> None:
        """What is forgotten goes by the rounds of all sessions. By one session's after the other, three rounds of 16
        were kept; and half a round where drafts counted as rare because drafting did not seem to pay, although all
        sessions were still at it (n-grams, 16 sessions: a mean acceptance of 0.36 to 0.88 within two seconds)."""
        if outcome.num_draft_tokens:
            decay = max(_RARE_DECAY, _DECAY**self._rounds_since_own)
            self.num_accepted = decay * self.num_accepted + outcome.num_accepted
            self.num_reached = decay * self.num_reached + num_reached(outcome)
            reached, wanted = num_reached(outcome), num_wanted(outcome)
            self.places.observe(outcome.num_accepted, reached, wanted, self.acceptance, decay)
        if outcome.num_asked:
            self._rounds_since_own = 0.0

    def _learn_end(self, outcome: RoundOutcome) -> None:
        """All of a draft was accepted, and the output ends before the next place: that one brings nothing, as if it had
        been rejected. Otherwise five tokens, with requests of 64, were thought to bring 4.14 a round and brought 3.92.
        """
        num_places = 1.0 if outcome.num_asked else self.proposed
        self.num_reached += num_places
        self.places.observe_end(outcome.num_accepted, num_wanted(outcome), num_places * self.acceptance)

    def expected_s(self, num_draft_tokens: int) -> float | None:
        """Seconds until so many draft tokens are there; None while nothing is known."""
        if self._last_overhead_s is None:
            return None
        return self.overhead_s + num_draft_tokens * (self.position_s or 0.0)

    def longest_within(self, load: VerifierLoad, round_s: float, max_draft_tokens: int) -> int:
        """The longest draft with which a round, from one piece of the output to the next, takes at most `round_s`."""
        lengths = range(max_draft_tokens, 0, -1)
        return next((n for n in lengths if load.step_s(n) + (self.expected_s(n) or 0.0) <= round_s), 0)

    def gain(
        self, load: VerifierLoad, acceptance: float, num_draft_tokens: int, *, with_round_trip: bool = True
    ) -> float:
        """Tokens that a round with so many draft tokens brings beyond a plain round, its costs counted in tokens.

        with_round_trip: what drafting costs as such; without, what it costs a session beside others that draft.
        """
        tokens, plain_rounds = self._tokens_and_rounds(load, acceptance, num_draft_tokens, with_round_trip)
        return tokens - plain_rounds

    def best_gain(
        self, load: VerifierLoad, acceptance: float, max_draft_tokens: int, *, with_round_trip: bool = True
    ) -> tuple[float, int]:
        """The largest gain, and the length that brings it; (0, 0) where there is no length to choose."""
        gains = (
            (self.gain(load, acceptance, length, with_round_trip=with_round_trip), length)
            for length in range(1, max_draft_tokens + 1)
        )
        return max(gains, default=(0.0, 0), key=lambda entry: entry[0])

    def settled_gain(self, load: VerifierLoad, max_draft_tokens: int) -> tuple[float, int]:
        """The length at which all sessions together get the most tokens a second, and its gain. `load`: with the rate
        of plain decoding. Of lengths that are about as good the shortest, and it stays until another is clearly better:
        sessions that decided at different times drafted 2 to 5 tokens in one batch, whose draft took as long as for 5
        (16 sessions with one length of 3: 1.05 of what they got with 3 to 5).
        """
        if max_draft_tokens <= 0:
            return 0.0, 0
        speedups = {length: self.speedup(load, length) for length in range(1, max_draft_tokens + 1)}
        best = max(speedups.values())
        length = next(length for length, speedup in speedups.items() if speedup >= _AS_GOOD * best)
        if speedups.get(self.settled_length, 0.0) >= _STILL_AS_GOOD * best:
            length = self.settled_length
        elif self.settled_length <= max_draft_tokens:  # a request that allows fewer settles nothing for the others
            self.settled_length = length
        return self.gain(load, self.acceptance, length), length

    def speedup(self, load: VerifierLoad, num_draft_tokens: int) -> float:
        """Tokens a second of all sessions when all of them draft so many, over those at the load's rate."""
        tokens, plain_rounds = self._tokens_and_rounds(load, self.acceptance, num_draft_tokens, with_round_trip=True)
        return tokens / plain_rounds

    def _tokens_and_rounds(
        self, load: VerifierLoad, acceptance: float, num_draft_tokens: int, with_round_trip: bool
    ) -> tuple[float, float]:
        """What a round brings a session, and how long it takes, in rounds at the load's rate without a draft."""
        # What holds up all sessions, or this one, costs as many tokens as one decodes alone meanwhile.
        own_rate = (load.tokens_per_s or 0.0) / load.batch_sessions
        tokens, num_proposed = self.of_a_round(acceptance, num_draft_tokens)
        proposed = num_proposed / max(1, num_draft_tokens)
        delay_s = num_draft_tokens * (self.position_s or 0.0)
        if with_round_trip:
            delay_s += self.overhead_s + load.proposals_s(num_draft_tokens, proposed)
        else:
            if self.local_time is not None:
                delay_s = 0.0  # those that the verifier drafts for together are no slower for one more
            delay_s += load.further_proposals_s(num_draft_tokens, proposed)
        return tokens, 1.0 + own_rate * delay_s

    def of_a_round(self, acceptance: float, num_draft_tokens: int) -> tuple[float, float]:
        """Tokens that a round of a session brings, and draft tokens that are proposed for it, where it asks for so
        many."""
        survival = self._survival(acceptance, max(num_draft_tokens, self.places.drafted_length))
        num_rounds = num_shorter_rounds(survival, num_draft_tokens, acceptance)
        missing = (1.0 - self.proposed) / num_rounds
        return (1.0 + sum(survival)) / num_rounds, (1.0 - missing) * num_draft_tokens

    def _survival(self, acceptance: float, num_draft_tokens: int) -> list[float]:
        """Chances that the first 1, 2, ... are proposed and accepted."""
        return [self.proposed * chance for chance in self.places.survival(acceptance, num_draft_tokens)]

    def takes_probe(self, load: VerifierLoad) -> bool:
        """Whether a session for which drafting does not seem to pay may try once."""
        if self.tokens_until_probe > 0:
            return False
        self.tokens_until_probe = self.probe_gap
        self.probe_gap = min(2 * self.probe_gap, round(_LONGEST_PROBE_GAP * load.batch_sessions))
        return True

    def pays_again(self, load: VerifierLoad) -> None:
        """Drafting seems to pay. Between two waves of 32 requests it does for a moment, as prices and rate are those of
        few sessions: with all pauses forgotten for it, a dozen probes followed in 3 s, and 6 % were lost."""
        if self._tokens_since_halved >= _PROBE_GAP * load.batch_sessions:
            self.probe_gap = max(_PROBE_GAP, self.probe_gap // 2)
            self._tokens_since_halved = 0


def _weight(num_rounds: float) -> float:
    """Of a figure in a mean over the rounds, so many after the one before."""
    return float(min(_RARE_WEIGHT, 1.0 - (1.0 - _COST_WEIGHT) ** num_rounds))


def num_reached(outcome: RoundOutcome | LateAnswer) -> int:
    """Draft tokens that the target looked at: those after the first rejection say nothing."""
    return min(outcome.num_draft_tokens, outcome.num_accepted + 1)


def num_wanted(outcome: RoundOutcome | LateAnswer) -> int:
    """Draft tokens that were asked for, or would have been if the output did not end before."""
    return outcome.num_asked + (outcome.num_beyond_end if isinstance(outcome, RoundOutcome) else 0)
