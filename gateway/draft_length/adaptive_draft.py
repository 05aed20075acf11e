"""`auto`: the draft policy that chooses the method and the number of draft tokens, or none.

One AdaptiveDraft per session decides with what all sessions at its verifier have learned (AutoDrafting). Whether to
draft, and the length, are decided for all sessions of a method together: a forward waits for the sessions that draft,
so all of them pay when some draft, or one drafts longer. A session drafts fewer tokens only if the common length brings
it nothing.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from outrider.gateway.draft_length.draft_costs import MethodCosts, num_reached
from outrider.gateway.draft_length.draft_policy import LateAnswer, RoundOutcome
from outrider.gateway.draft_length.goodput_guard import GoodputGuard
from outrider.gateway.draft_length.length_trials import LengthTrials
from outrider.gateway.draft_length.verifier_load import VerifierLoad
from outrider.gateway.request.types import METHOD_AUTO

# forgetting of a session's own acceptance per draft, a memory of about 20; 0487296
_OWN_DECAY = 0.95
# draft tokens; weight of all sessions' acceptance against a session's own; 0487296
_PRIOR_TOKENS = 8.0
# tokens; shortest and longest free run of a session without drafts between two decisions; 381e5e7, 47067eb
MUTED_RUN, LONGEST_MUTED_RUN = 48, 384
# draft tokens of a probe; chosen: the least that shows a second position
_PROBE_LENGTH = 2
# rounds of a probe at most: hidden states, catching up, and one that shows the cost; 3a7fdf4
_PROBE_ROUNDS = 3
# tokens per round beyond plain decoding; smallest gain to draft for, alone and in a shared batch; docs/log.md: 9bc3167
_MIN_GAIN_ALONE, _MIN_GAIN_SHARED = 0.02, 0.04
# mean sessions in a forward; above it the batch counts as shared; 9bc3167
_SHARED_BATCH = 1.5
# tokens; a session keeps its method at least for these; 47067eb
_STAY_TOKENS = 64
# tokens per round; smallest gain for which a session changes its method; 47067eb
_CHANGE_GAIN = 0.1
# ratio to the usual answer time; bounds the wait for an answer, plus one plain round; da56d95
_PATIENCE = 4.0
# plain rounds; bounds the wait for a method's first answer; da56d95
_FIRST_PATIENCE_ROUNDS = 2.0
# tokens per session in a batch; first gap until a session tries another method, as between probes (draft_costs: a try
# of what does not pay is one); doubles per try
_TRY_GAP = 48
# tokens over all sessions; longest such gap; 47067eb
_LONGEST_TRY_GAP = 32_768


@dataclass
class _Tries:
    """Of one method. num_tokens: over all sessions, since the last try. gap: per session in a batch."""

    num_tokens: int = 0
    gap: int = _TRY_GAP


@dataclass
class AutoDrafting:
    """Shared by all sessions of this gateway at one verifier.

    slo_itl_s: objective for the time of a round, which is the time between two pieces of a stream; drafts must fit in.
    """

    slo_itl_s: float = math.inf
    load: VerifierLoad = field(default_factory=VerifierLoad)
    costs: defaultdict[str, MethodCosts] = field(default_factory=lambda: defaultdict(MethodCosts))
    guard: GoodputGuard = field(default_factory=GoodputGuard)
    lengths: LengthTrials = field(default_factory=LengthTrials)
    _tries: defaultdict[str, _Tries] = field(default_factory=lambda: defaultdict(_Tries))

    def observe(self, outcome: RoundOutcome, method: str) -> None:
        self.load.observe(outcome)
        self.costs[method].observe(outcome)
        self.guard.observe(outcome, method)
        self.lengths.observe(outcome, method)
        for tries in self._tries.values():
            tries.num_tokens += 1 + outcome.num_accepted

    def load_without_drafts(self) -> VerifierLoad:
        """The load at the rate without drafts, which drafting has to beat. The rate with drafts fluctuates with
        acceptance: compared with it, drafting would stop after every good streak (22928a7).
        """
        plain = self.guard.plain_tokens_per_s or self.load.plain_tokens_per_s
        if plain is None or self.load.tokens_per_s is None:
            return self.load
        return dataclasses.replace(self.load, tokens_per_s=min(plain, self.load.tokens_per_s))

    @property
    def min_gain(self) -> float:
        """Smallest gain to draft for, in tokens per round."""
        return _MIN_GAIN_SHARED if self.load.batch_sessions > _SHARED_BATCH else _MIN_GAIN_ALONE

    def takes_try(self, methods: Sequence[str]) -> str | None:
        """One of `methods` that is due for a try although another seems better; None: none is."""
        for method in methods:
            tries = self._tries[method]
            if tries.num_tokens >= min(tries.gap * self.load.batch_sessions, _LONGEST_TRY_GAP):
                tries.num_tokens, tries.gap = 0, min(2 * tries.gap, _LONGEST_TRY_GAP)
                return method
        return None


class AdaptiveDraft:
    """A DraftPolicy. offered: the methods available now, best guess first, with the most tokens that each drafts (0: no
    known limit); called every _STAY_TOKENS tokens.
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
        # Tokens until the next decision under local drafting; 0: nothing is drafted.
        self._run_tokens = 0
        self.method = ""
        self.patience_s = math.inf

    def num_draft_tokens(self, *, before_prefill: bool = False) -> int:
        self._run_tokens = 0
        guard = self._shared.guard
        if self._stay_tokens <= 0 or guard.mute_tokens_left(self.method) > 0:
            self._choose_method()
        if not guard.allows_drafts(self.method):
            return 0
        length = self._paying_length() or self._probe(before_prefill=before_prefill)
        if length == 0 and not before_prefill:
            self.method = self._best_method()
            length = self._paying_length()
        return length

    def _paying_length(self) -> int:
        """The length for this session if drafting with its method pays, else 0."""
        shared, costs = self._shared, self._shared.costs[self.method]
        load = shared.load_without_drafts()
        gain, longest = costs.settled_gain(load, self._most_tokens(self.method))
        if gain <= shared.min_gain:
            return 0
        longest = shared.lengths.length(self.method, longest, lambda length: costs.speedup(load, length))
        gain, length = self._own_length(costs, longest)
        if gain <= 0.0:
            return 0
        costs.pays_again(load)
        in_time_s = max(0.0, shared.slo_itl_s - shared.load.step_s(length))
        self.patience_s = min(in_time_s, self._patience_s(costs.expected_s(length), gain + 1.0))
        self._run_tokens = _STAY_TOKENS
        return length

    def _own_length(self, costs: MethodCosts, longest: int) -> tuple[float, int]:
        """Gain and length of this session: the common length unless that brings it nothing, then the best shorter one.

        Not always its own best: a session has few samples of its own acceptance, and they are old when they count.
        """
        load, acceptance = self._shared.load, self._acceptance(self.method)
        gain = costs.gain(load, acceptance, longest, with_round_trip=False)
        return (gain, longest) if gain > 0.0 else costs.best_gain(load, acceptance, longest, with_round_trip=False)

    def _probe(self, *, before_prefill: bool) -> int:
        """The length of a short draft if a probe is due, else 0.

        A probe waits for its answer, for at most a plain round: an answer that comes during a forward takes longer than
        one that is waited for.
        """
        load, costs, self.patience_s = self._shared.load, self._shared.costs[self.method], 0.0
        num_draft_tokens = min(_PROBE_LENGTH, self._most_tokens(self.method))
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
        """Seconds to wait for a draft that should pay. expected_s: the usual answer time; None: no answer yet.
        worth_rounds: plain rounds that bring as many tokens as the draft, beyond its usual time.
        """
        load = self._shared.load
        if load.tokens_per_s is None:
            return math.inf
        plain_s = load.batch_sessions / load.tokens_per_s
        if expected_s is None:
            return _FIRST_PATIENCE_ROUNDS * plain_s
        return min(_PATIENCE * expected_s + plain_s, expected_s + worth_rounds * plain_s)

    def free_run(self) -> int:
        """Tokens until the decision may change: an earlier return to the gateway would cost a wait or a turn."""
        shared = self._shared
        if self._run_tokens:
            return self._run_tokens
        paused = [shared.guard.mute_tokens_left(method) for method in (self._limits or {self.method: 0})]
        tokens_left = max(min(paused), shared.costs[self.method].tokens_until_probe)
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
        """The session's own, with that of all sessions as the prior."""
        accepted = self._num_accepted[method] + _PRIOR_TOKENS * self._shared.costs[method].acceptance
        return accepted / (self._num_reached[method] + _PRIOR_TOKENS)

    def _choose_method(self) -> None:
        """The best method, or another one that is due for a try, which begins with a probe."""
        self._stay_tokens = _STAY_TOKENS
        self._limits = self._offered()
        best, guard = self._best_method(), self._shared.guard
        others = [name for name in self._limits if name != best and guard.mute_tokens_left(name) <= 0]
        tried = self._shared.takes_try(others)
        self.method = tried or best
        self._probe_rounds_left = _PROBE_ROUNDS if tried else 0

    def _best_method(self) -> str:
        """The method with the largest gain; one that pauses only if all do.

        One of which nothing is known counts as just worth drafting with: it is tried before drafts are given up.
        """
        shared = self._shared
        methods = [name for name in self._limits if shared.guard.mute_tokens_left(name) <= 0] or list(self._limits)
        if len(methods) < 2:
            return methods[0] if methods else METHOD_AUTO
        gains = {name: self._gain(name) if shared.costs[name].is_known else shared.min_gain for name in methods}
        best = max(methods, key=lambda name: gains[name])
        own_gain = gains.get(self.method, -math.inf)
        now_pays = own_gain < shared.min_gain <= gains[best]
        return self.method if gains[best] < own_gain + _CHANGE_GAIN and not now_pays else best

    def _gain(self, method: str) -> float:
        costs = self._shared.costs[method]
        load = self._shared.load_without_drafts()
        return costs.best_gain(load, self._acceptance(method), self._most_tokens(method))[0]

    def _most_tokens(self, method: str) -> int:
        """The longest draft within the request's limit, the method's limit and slo_itl_s."""
        most = min(self._max_draft_tokens, self._limits.get(method) or self._max_draft_tokens)
        slo_s, shared = self._shared.slo_itl_s, self._shared
        return most if slo_s == math.inf else shared.costs[method].longest_within(shared.load, slo_s, most)
