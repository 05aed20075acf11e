"""`auto`: the method and the number of draft tokens that pay, or none.

One AdaptiveDraft per session decides with what all sessions of the gateway have learned (AutoDrafting). Whether to
draft, and how many tokens at most, is settled for all sessions of a method alike: a forward waits for those who draft,
and when only some do, or one drafts longer, all pay for the waiting. How many of them, none included, is then a
session's own affair.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gateway.draft_costs import MethodCosts, num_reached
from gateway.draft_policy import LateAnswer, RoundOutcome
from gateway.goodput_guard import GoodputGuard
from gateway.length_trials import LengthTrials
from gateway.requests import METHOD_AUTO
from gateway.verifier_load import VerifierLoad

# A session forgets its own rounds at this rate.
_OWN_DECAY = 0.95
# Positions of other sessions that a session believes as much as its own.
_PRIOR_POSITIONS = 8.0
# Tokens that a muted session decodes alone before it looks again.
MUTED_RUN = 48
LONGEST_MUTED_RUN = 384
_PROBE_LENGTH = 2
# Rounds of a probe at most: in one the hidden states come, in one the drafter catches up, and one tells what it costs.
_PROBE_ROUNDS = 3
# Tokens a round with a draft must promise beyond a plain one: smaller gains are within the noise of the costs. Beside
# others more: sessions that draft end at different times, which leaves the last ones alone, and prompts come one by one
# (n-grams at temperature 1, 8 sessions: 2 % ahead while all are there, 3 % behind over all rounds).
_MIN_GAIN, _MIN_GAIN_BESIDE_OTHERS = 0.02, 0.04
_BESIDE_OTHERS = 1.5  # sessions in a forward
# A session stays with a method for so many tokens, and changes it for no less than so many tokens a round.
_STAY_TOKENS = 64
_CHANGE_GAIN = 0.1
# An answer that takes longer than so many times the usual, and a round more, is not waited for.
_PATIENCE = 4.0
# Plain rounds that the first answer of a method may take.
_FIRST_PATIENCE_ROUNDS = 2.0
# Tokens of all sessions until one tries a method that is not the best; twice as many after each try that shows no gain.
_TRY_GAP = 512
_LONGEST_TRY_GAP = 32_768


@dataclass
class _Tries:
    tokens_left: int = _TRY_GAP
    gap: int = _TRY_GAP


@dataclass
class AutoDrafting:
    """What all sessions of a gateway know together. slo_itl_s: the longest time that a round should take, which is the
    time between two pieces of a stream; no draft is asked for that would make it longer."""

    slo_itl_s: float = math.inf
    load: VerifierLoad = field(default_factory=VerifierLoad)
    costs: defaultdict[str, MethodCosts] = field(default_factory=lambda: defaultdict(MethodCosts))
    guard: GoodputGuard = field(default_factory=GoodputGuard)
    lengths: LengthTrials = field(default_factory=LengthTrials)
    _tries: defaultdict[str, _Tries] = field(default_factory=lambda: defaultdict(_Tries))

    def observe(self, outcome: RoundOutcome, method: str) -> None:
        self.load.observe(outcome)
        self.costs[method].observe(outcome)
        self.guard.observe(outcome)
        self.lengths.observe(outcome, method)
        for tries in self._tries.values():
            tries.tokens_left -= 1 + outcome.num_accepted

    def load_without_drafts(self) -> VerifierLoad:
        """The load with the rate that drafting as such has to beat. The rate with drafts is higher where they pay, and
        swings with luck: held against it, drafting stopped after every good streak (20 ms away: 1.1 instead of 1.3)."""
        plain = self.guard.plain_tokens_per_s or self.load.plain_tokens_per_s
        if plain is None or self.load.tokens_per_s is None:
            return self.load
        return dataclasses.replace(self.load, tokens_per_s=min(plain, self.load.tokens_per_s))

    def is_known(self, method: str) -> bool:
        return self.costs[method].position_s is not None

    def takes_try(self, methods: Sequence[str]) -> str | None:
        """One of `methods` that a session should try although another is better, as far as is known."""
        for method in methods:
            tries = self._tries[method]
            if tries.tokens_left <= 0:
                tries.tokens_left = tries.gap
                tries.gap = min(2 * tries.gap, _LONGEST_TRY_GAP)
                return method
        return None


class AdaptiveDraft:
    """gateway.draft_policy.DraftPolicy. `offered`: the methods that a drafter could be asked for now, best guess first,
    and the most tokens that each drafts (0: no limit known); they are looked at between runs of 64 tokens.
    """

    def __init__(self, shared: AutoDrafting, max_draft_tokens: int, offered: Callable[[], Mapping[str, int]]) -> None:
        self._shared = shared
        self._max_draft_tokens = max_draft_tokens
        self._offered = offered
        self._limits: Mapping[str, int] = {}
        self._num_accepted: defaultdict[str, float] = defaultdict(float)
        self._num_reached: defaultdict[str, float] = defaultdict(float)
        self._stay_tokens = 0
        self._probe_rounds_left = 0
        # Tokens until the next decision where the verifier drafts by itself; 0: nothing is drafted.
        self._run_tokens = 0
        self.method = ""
        self.patience_s = math.inf

    def num_draft_tokens(self, *, before_prefill: bool = False) -> int:
        self._run_tokens = 0
        if self._stay_tokens <= 0:
            self._choose_method()
        shared, costs = self._shared, self._shared.costs[self.method]
        if not shared.guard.allows_drafts():
            return 0
        most = self._most_tokens(self.method)
        load = shared.load_without_drafts()
        gain, longest = costs.settled_gain(load, most)
        if gain > (_MIN_GAIN_BESIDE_OTHERS if load.batch_sessions > _BESIDE_OTHERS else _MIN_GAIN):
            longest = shared.lengths.length(self.method, longest, lambda length: costs.speedup(load, length))
            gain, length = self._own_length(costs, longest)
            if gain > 0.0:
                costs.pays_again(load)
                in_time_s = max(0.0, shared.slo_itl_s - shared.load.step_s(length))
                self.patience_s = min(in_time_s, self._patience_s(costs.expected_s(length), gain + 1.0))
                self._run_tokens = _STAY_TOKENS
                return length
        return self._probe(min(_PROBE_LENGTH, most), before_prefill=before_prefill)

    def _own_length(self, costs: MethodCosts, longest: int) -> tuple[float, int]:
        """What all draft, or less where that would bring this session nothing. To draft less wherever that seems a
        little better made the slowest sessions slower still: what a session has seen of its own acceptance is little,
        and old by the time that it counts."""
        load, acceptance = self._shared.load, self._acceptance(self.method)
        gain = costs.gain(load, acceptance, longest, with_round_trip=False)
        return (gain, longest) if gain > 0.0 else costs.best_gain(load, acceptance, longest, with_round_trip=False)

    def _probe(self, num_draft_tokens: int, *, before_prefill: bool) -> int:
        """A short draft, or none: what is thought not to pay is tried now and then.

        An answer that is not waited for comes from beside a forward, where it takes longer; so a probe waits for it,
        but no longer than a plain round.
        """
        load, costs, self.patience_s = self._shared.load, self._shared.costs[self.method], 0.0
        self._run_tokens = num_draft_tokens + 1
        if before_prefill and costs.tokens_until_probe <= 0:
            return num_draft_tokens
        if not before_prefill and self._probe_rounds_left <= 0 and costs.takes_probe(load):
            self._probe_rounds_left = _PROBE_ROUNDS
        if before_prefill or self._probe_rounds_left <= 0:
            self._run_tokens = 0
            return 0
        self._probe_rounds_left -= 1
        self.patience_s = load.batch_sessions / load.tokens_per_s if load.tokens_per_s else 0.0
        return num_draft_tokens

    def _patience_s(self, expected_s: float | None, worth_rounds: float) -> float:
        """How long to wait for a draft that should pay: nobody knows how far away the first answer of a method is.
        worth_rounds: plain rounds in which decoding alone would bring as much beyond the draft's usual time."""
        load = self._shared.load
        if load.tokens_per_s is None:
            return math.inf
        plain_s = load.batch_sessions / load.tokens_per_s
        if expected_s is None:
            return _FIRST_PATIENCE_ROUNDS * plain_s
        return min(_PATIENCE * expected_s + plain_s, expected_s + worth_rounds * plain_s)

    def free_run(self) -> int:
        """Until something else may be decided: a return to the gateway costs the others a wait or this one a turn."""
        shared = self._shared
        if self._run_tokens:
            return self._run_tokens
        tokens_left = max(shared.guard.mute_tokens_left, shared.costs[self.method].tokens_until_probe)
        return min(LONGEST_MUTED_RUN, max(MUTED_RUN, round(tokens_left / shared.load.batch_sessions)))

    def observe(self, outcome: RoundOutcome) -> None:
        method = outcome.method or self.method
        self._shared.observe(outcome, method)
        self._stay_tokens -= 1 + outcome.num_accepted
        if outcome.num_asked and not outcome.is_catch_up:
            self._probe_rounds_left = 0
        if outcome.num_draft_tokens:
            self._num_accepted[method] = _OWN_DECAY * self._num_accepted[method] + outcome.num_accepted
            self._num_reached[method] = _OWN_DECAY * self._num_reached[method] + num_reached(outcome)

    def observe_late(self, answer: LateAnswer) -> None:
        if not answer.is_catch_up:
            self._probe_rounds_left = 0
        self._shared.costs[answer.method].learn(answer)

    def _acceptance(self, method: str) -> float:
        """Its own, as far as it has seen any, else that of all."""
        accepted = self._num_accepted[method] + _PRIOR_POSITIONS * self._shared.costs[method].acceptance
        return accepted / (self._num_reached[method] + _PRIOR_POSITIONS)

    def _choose_method(self) -> None:
        """The one with the largest gain among those that are known; now and then another."""
        self._stay_tokens = _STAY_TOKENS
        self._limits = self._offered()
        shared, methods = self._shared, list(self._limits)
        if len(methods) < 2:
            self.method = methods[0] if methods else METHOD_AUTO
            return
        gains = {method: self._gain(method) for method in methods if shared.is_known(method)}
        best = max(gains, key=lambda method: gains[method], default=methods[0])
        if self.method in gains and gains[best] < gains[self.method] + _CHANGE_GAIN:
            best = self.method
        self.method = shared.takes_try([method for method in methods if method != best]) or best

    def _gain(self, method: str) -> float:
        costs = self._shared.costs[method]
        load = self._shared.load_without_drafts()
        return costs.best_gain(load, self._acceptance(method), self._most_tokens(method))[0]

    def _most_tokens(self, method: str) -> int:
        """The request's most within the method's limit (places behind it bring nothing, and must promise nothing), and
        within what the promised time between two pieces leaves."""
        most = min(self._max_draft_tokens, self._limits.get(method) or self._max_draft_tokens)
        slo_s, shared = self._shared.slo_itl_s, self._shared
        return most if slo_s == math.inf else shared.costs[method].longest_within(shared.load, slo_s, most)
