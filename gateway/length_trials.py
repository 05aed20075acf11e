"""Whether all sessions of a load should draft fewer tokens than the cost model says: tried in turn, and measured.

The model (draft_costs) prices drafting and rows. It does not see that longer rounds leave sessions out: whoever ends
in one, or comes, waits for the next (32 sessions with requests of 64 tokens: 26 in a forward with three drafts, 29 with
one, 31 without). What is left between lengths that the model holds for about equal is of that size, so with many
sessions the shorter one is measured against it. One that it holds for clearly worse is not: a trial costs more than it
can bring (16 sessions, three tokens and one: half of its 150 rounds at 0.8 of the tokens a second).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from gateway.draft_policy import RoundOutcome
from shared.loads import load_of
from shared.two_ways import TwoWays

# With fewer sessions a round's tokens scatter more than the lengths differ, and rows cost next to nothing.
_FEWEST_SESSIONS = 12
# So many tokens fewer, where the model holds them for this share of its best or more.
_STEP = 2
_ALIKE = 0.95
_LOADS_PER_DOUBLING = 2
# Tokens per session: a turn, of which the first are still of both lengths, and what a comparison takes of each. Turns
# of 24 rounds were half an answer of 64 tokens, of which the first is harder to draft: whoever had the first turn lost.
_TURN_TOKENS, _SETTLE_TOKENS, _TRIAL_TOKENS = 20, 7, 80
# Parts of the same answers bring 540 to 840 tokens a second, and a comparison sees eight: with 0.02 one token was taken
# for two where it brought 3 % less, and for three where it brought 5 % less (n-grams, 16 sessions).
_LEAST_GAIN = 0.04


class LengthTrials:
    """Shared by all sessions of a gateway."""

    def __init__(self) -> None:
        self._num_sessions = 1
        self._trials: defaultdict[tuple[str, int], TwoWays] = defaultdict(self._new_trial)
        # What the model says of each method whose shorter drafts are to be tried, and the part of a round that has been
        # told of since the last whole one.
        self._model_lengths: dict[str, int] = {}
        self._told = 0.0

    def length(self, method: str, model_length: int, speedup: Callable[[int], float]) -> int:
        """What to draft at most, where the model says `model_length`; speedup: what it says that a length brings."""
        shorter = _shorter(model_length)
        is_alike = shorter < model_length and speedup(shorter) >= _ALIKE * speedup(model_length)
        self._model_lengths[method] = model_length if is_alike else 0
        if not is_alike or self._num_sessions < _FEWEST_SESSIONS:
            return model_length
        return shorter if self._trials[self._key(method)].takes_second else model_length

    def observe(self, outcome: RoundOutcome, method: str) -> None:
        """Every session of a batch tells of its round."""
        self._num_sessions = max(1, outcome.open_sessions, outcome.batch_sessions)
        model_length = self._model_lengths.get(method, 0)
        depth = outcome.draft_depth or outcome.num_asked
        # Others are of what the model said before: requests that come together begin with what suits few sessions,
        # which was a quarter of an answer's rounds, and counted against the longer of the two.
        if not depth or depth not in (model_length, _shorter(model_length)) or self._num_sessions < _FEWEST_SESSIONS:
            return
        self._told += 1.0 / max(1, outcome.batch_sessions)
        if self._told >= 1.0 and outcome.round_tokens > 0 and outcome.round_s > 0.0:
            self._told = 0.0
            is_shorter = depth < model_length
            # Tokens count, not rounds: those of longer drafts vary more, and in a mean over rounds of the seconds a
            # token takes, poor rounds weigh more than good ones (n-grams, 16 sessions: 2 % against three tokens).
            token_s = outcome.round_s / outcome.round_tokens
            self._trials[self._key(method)].observe(token_s, second=is_shorter, count=outcome.round_tokens)

    def _new_trial(self) -> TwoWays:
        turn, trial, settle = (self._num_sessions * tokens for tokens in (_TURN_TOKENS, _TRIAL_TOKENS, _SETTLE_TOKENS))
        return TwoWays(turn, trial, settle, _LEAST_GAIN)

    def _key(self, method: str) -> tuple[str, int]:
        return method, load_of(self._num_sessions, _LOADS_PER_DOUBLING)


def _shorter(length: int) -> int:
    """Where there is none, the length itself."""
    return length - _STEP if length > _STEP else length
