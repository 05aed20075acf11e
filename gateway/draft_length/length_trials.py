"""A/B trials of a shorter draft length against the cost model's, per method and load class.

The cost model (draft_costs) does not see that longer rounds leave out sessions that end or arrive meanwhile: of 32
sessions with requests of 64 tokens 26 are in a forward with three draft tokens, and 31 without. With many sessions that
decides between lengths that the model rates about equal, so the shorter one is tried. A length that the model rates
clearly worse is not tried: its trial would cost more than it could bring (645118f).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from outrider.gateway.draft_length.draft_policy import RoundOutcome
from outrider.shared.draft_policy.ab_trial import ABTrial
from outrider.shared.draft_policy.loads import load_of

# sessions; with fewer, a round's tokens vary more than the lengths differ, and rows cost little; fde2b68
_MIN_SESSIONS = 12
# tokens; the shorter length is shorter by this; fde2b68
_STEP = 2
# share of the model's best speed-up; a shorter length rated below it is not tried; 645118f
_ALIKE = 0.95
# load classes per doubling of the sessions; chosen: coarser than LOADS_PER_DOUBLING, as trials are long
_LOADS_PER_DOUBLING = 2
# tokens per session; ABTrial's turn_rounds, settle_rounds, trial_rounds; docs/log.md: 56f2224, 1ac9ae1
_TURN_TOKENS, _SETTLE_TOKENS, _TRIAL_TOKENS = 20, 7, 80
# share; smallest gain for which the shorter length is taken; docs/log.md: 8ba6c6e
_LEAST_GAIN = 0.04


class LengthTrials:
    """Shared by all sessions of a gateway."""

    def __init__(self) -> None:
        self._num_sessions = 1
        self._trials: defaultdict[tuple[str, int], ABTrial] = defaultdict(self._new_trial)
        # The cost model's length per method, 0 without a trial; and the share of the current round reported so far.
        self._model_lengths: dict[str, int] = {}
        self._reported = 0.0

    def length(self, method: str, model_length: int, speedup: Callable[[int], float]) -> int:
        """The length for all sessions: the model's, or the shorter one. speedup: the model's, of a length."""
        shorter = _shorter(model_length)
        is_alike = shorter < model_length and speedup(shorter) >= _ALIKE * speedup(model_length)
        self._model_lengths[method] = model_length if is_alike else 0
        if not is_alike or self._num_sessions < _MIN_SESSIONS:
            return model_length
        return shorter if self._trials[self._key(method)].takes_second else model_length

    def observe(self, outcome: RoundOutcome, method: str) -> None:
        """A round of one session; every session of a batch reports it."""
        self._num_sessions = max(1, outcome.open_sessions, outcome.batch_sessions)
        model_length = self._model_lengths.get(method, 0)
        depth = outcome.draft_depth or outcome.num_asked
        # Rounds of other lengths follow an earlier decision and do not count (docs/log.md: 1ac9ae1).
        if not depth or depth not in (model_length, _shorter(model_length)) or self._num_sessions < _MIN_SESSIONS:
            return
        self._reported += 1.0 / max(1, outcome.batch_sessions)
        if self._reported >= 1.0 and outcome.round_tokens > 0 and outcome.round_s > 0.0:
            self._reported = 0.0
            is_shorter = depth < model_length
            # Counted in tokens: a mean of seconds per token over rounds is biased against longer drafts, whose rounds
            # vary more (docs/log.md: 1ac9ae1).
            token_s = outcome.round_s / outcome.round_tokens
            self._trials[self._key(method)].observe(token_s, second=is_shorter, count=outcome.round_tokens)

    def _new_trial(self) -> ABTrial:
        turn, trial, settle = (self._num_sessions * tokens for tokens in (_TURN_TOKENS, _TRIAL_TOKENS, _SETTLE_TOKENS))
        return ABTrial(turn, trial, settle, _LEAST_GAIN)

    def _key(self, method: str) -> tuple[str, int]:
        return method, load_of(self._num_sessions, _LOADS_PER_DOUBLING)


def _shorter(length: int) -> int:
    """By _STEP; the length itself if it is not longer than that."""
    return length - _STEP if length > _STEP else length
