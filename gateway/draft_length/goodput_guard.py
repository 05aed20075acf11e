"""Guard on measured goodput: pauses a method at a load where it has brought fewer tokens/s than plain decoding.

The cost model (draft_costs) leaves things out: a drafter on the verifier's machine takes cores and memory bandwidth,
and sessions wait for each other. So the guard compares the verifier's rounds with drafts to its rounds without, per
method and load class of open sessions (not of sessions in a forward, which drafting splits). A method that loses pauses
at this load, twice as long after each further loss. Rounds with drafts are forgotten slowly, but within a few hundred
rounds when requests change. A load without a verdict inherits a clear loss from the next lower load that has one.

Not here: how many tokens to draft.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from outrider.gateway.draft_length.draft_policy import RoundOutcome
from outrider.shared.draft_policy.loads import LOADS_PER_DOUBLING, load_of

# rounds; ignored after a change between drafting and plain decoding; 47067eb
_SETTLE_ROUNDS = 4.0
# share of the sessions; a change to drafting settles once this share drafts: methods catch up one by one; fde2b68
_SETTLED_SHARE = 0.75
# rounds; a change to drafting settles after these at the latest; fde2b68
_LONGEST_SETTLE_ROUNDS = 48.0
# rounds without drafts that a comparison needs, and that a close one needs; docs/log.md: 9bc3167
_PLAIN_ROUNDS, _MANY_PLAIN_ROUNDS = 12.0, 48.0
# rounds with drafts that a comparison needs; fde2b68
_DRAFTING_ROUNDS = 12.0
# session rounds with drafts before the first comparison, and before a loss of any size counts; 47067eb
_FIRST_SESSION_ROUNDS, _MANY_SESSION_ROUNDS = 48.0, 1600.0
# coefficients of variation: of a session round's tokens with drafts (47067eb), and of a round's seconds (fde2b68)
_TOKEN_SPREAD, _ROUND_SPREAD = 0.6, 0.1
# standard errors that make a loss or a win; 07bf6f5: the guard must find small losses soon, small wins can wait
_LOSS_ERRORS, _WIN_ERRORS = 1.25, 2.0
# rounds; memory of the exponential means; 47067eb
_MEMORY_ROUNDS = 400.0
# rounds and session rounds of a stretch; two that deviate alike replace the memory; docs/log.md: 9bc3167
_STRETCH_ROUNDS, _STRETCH_SESSION_ROUNDS = 64.0, 512.0
# standard errors by which a stretch deviates; docs/log.md: 9bc3167
_CHANGE_ERRORS = 2.5
# tokens over all sessions, and per session; the larger is how long a plain baseline is valid; 47067eb, 7a673ae
_FRESH_TOKENS, _FRESH_TOKENS_PER_SESSION = 20_000, 2_500
# tokens over all sessions; that validity while drafting wins by more than this ratio; 47067eb
_LONG_FRESH_TOKENS, _WINS_BY_FAR = 200_000, 1.3
# ratio; a win this large is assumed to hold at neighbouring loads, so no comparison is scheduled there; 32473d4
_WINS_CLEARLY = 1.15
# tokens over all sessions, and per session; the larger is the first pause after a loss; 47067eb, 18abf69
_FIRST_MUTE_TOKENS, _MUTE_TOKENS_PER_SESSION = 4_000, 500
# tokens over all sessions; longest pause; 47067eb
_LONGEST_MUTE_TOKENS = 128_000


@dataclass
class _Rounds:
    """Exponential sums over rounds, with drafts or without."""

    tokens: float = 0.0
    seconds: float = 0.0
    count: float = 0.0
    # A round of 8 sessions is 8 session rounds.
    num_session_rounds: float = 0.0

    def add(self, outcome: RoundOutcome, share: float) -> None:
        keep = 1.0 - share / _MEMORY_ROUNDS if self.count >= _MEMORY_ROUNDS else 1.0
        self.tokens = keep * self.tokens + share * outcome.round_tokens
        self.seconds = keep * self.seconds + share * outcome.round_s
        self.count = keep * self.count + share
        self.num_session_rounds = keep * self.num_session_rounds + 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass
class _DraftingRounds(_Rounds):
    """Rounds with drafts, whose rate changes with the requests."""

    _stretch: _Rounds = field(default_factory=_Rounds)
    # The stretch before it, if that deviated; and whether upwards.
    _deviating: _Rounds | None = None
    _was_faster: bool = False

    def add(self, outcome: RoundOutcome, share: float) -> None:
        super().add(outcome, share)
        self._stretch.add(outcome, share)
        if self._stretch.count >= _STRETCH_ROUNDS and self._stretch.num_session_rounds >= _STRETCH_SESSION_ROUNDS:
            self._follow_change()
            self._stretch = _Rounds()

    def _follow_change(self) -> None:
        """Replaces the memory by the last two stretches if both deviate from it in one direction. One alone may be a
        few answers that are hard to draft for.
        """
        ratio = self._stretch.tokens_per_s / self.tokens_per_s
        deviates = abs(ratio - 1.0) > _CHANGE_ERRORS * _error(self._stretch, self)
        if deviates and self._deviating and (ratio > 1.0) == self._was_faster:
            new = (self._stretch, self._deviating)
            self.tokens, self.seconds = sum(part.tokens for part in new), sum(part.seconds for part in new)
            self.count = sum(part.count for part in new)
            self.num_session_rounds = sum(part.num_session_rounds for part in new)
            deviates = False
        self._deviating, self._was_faster = self._stretch if deviates else None, ratio > 1.0


@dataclass
class _Trial:
    """Of one method at one load class."""

    drafting: _DraftingRounds = field(default_factory=_DraftingRounds)
    # Tokens over all sessions until the pause ends; 0 or less: no pause.
    mute_left: int = 0
    # Length of the next pause; 0: the load's first_mute_tokens.
    mute_tokens: int = 0
    # The verdict: of the last comparison here, or a clear loss at a lower load.
    is_judged: bool = False
    has_clearly_lost: bool = False
    has_won: bool = False
    has_clearly_won: bool = False
    # Whether the first comparison was a loss; it is repeated once, as a server that has just started is slow.
    is_suspect: bool = False

    def mute(self, first_mute_tokens: int, *, is_clear: bool) -> None:
        self.mute_left = self.mute_tokens or first_mute_tokens
        self.mute_tokens = min(2 * self.mute_left, _LONGEST_MUTE_TOKENS)
        self.is_judged, self.has_clearly_lost = True, is_clear
        self.has_won = self.has_clearly_won = False
        self.drafting = _DraftingRounds()


@dataclass
class _Load:
    """Of one load class. first_mute_tokens: first pause after a loss. fresh_tokens: validity of the plain baseline."""

    first_mute_tokens: int = _FIRST_MUTE_TOKENS
    fresh_tokens: int = _FRESH_TOKENS
    plain: _Rounds = field(default_factory=_Rounds)
    # Tokens over all sessions since `plain` was measured.
    plain_age: int = 0
    # By method.
    trials: dict[str, _Trial] = field(default_factory=dict)


class GoodputGuard:
    """Shared by all sessions of a gateway at one verifier."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load = _Load()
        self._load_class = load_of(1)
        self._is_drafting = False
        self._drafting_share = 0.0  # of the sessions, over the last rounds
        self._has_settled = True
        self._rounds_since_change = 0.0
        self._rounds_since_draft = _SETTLE_ROUNDS
        # Rounds without drafts that a pending comparison still needs.
        self._plain_rounds_left = 0.0

    def allows_drafts(self, method: str) -> bool:
        return self.mute_tokens_left(method) <= 0 and self._plain_rounds_left <= 0.0

    def mute_tokens_left(self, method: str) -> int:
        """Tokens over all sessions until the method's pause ends; 0 or less: no pause."""
        return self._trial_of(method).mute_left

    @property
    def plain_tokens_per_s(self) -> float | None:
        """The verifier's rate at this load without drafts; None before _PLAIN_ROUNDS."""
        plain = self._load.plain
        return plain.tokens_per_s if plain.count >= _PLAIN_ROUNDS else None

    def observe(self, outcome: RoundOutcome, method: str) -> None:
        """A round of any session whose policy is `auto`. method: its own, whether it drafted or not."""
        self._move_to(max(1, outcome.open_sessions, outcome.batch_sessions))
        share = 1.0 / max(1, outcome.batch_sessions)  # every session in a round reports it
        self._load.plain_age += 1 + outcome.num_accepted
        for trial in self._load.trials.values():
            trial.mute_left -= 1 + outcome.num_accepted
        self._track_change(outcome, share)
        if outcome.round_tokens <= 0 or outcome.round_s <= 0.0 or not self._has_settled:
            return
        if self._is_drafting:
            trial = self._trial_of(method)
            if trial.mute_left <= 0:  # else drafts from before the pause, already counted
                trial.drafting.add(outcome, share)
                self._compare(method, trial)
        else:
            self._load.plain.add(outcome, share)
            self._load.plain_age = 0
            self._plain_rounds_left = max(0.0, self._plain_rounds_left - share)

    def _move_to(self, num_sessions: int) -> None:
        self._load_class = load_of(num_sessions)
        if self._load_class not in self._loads:
            self._loads[self._load_class] = _Load(
                max(_FIRST_MUTE_TOKENS, _MUTE_TOKENS_PER_SESSION * num_sessions),
                max(_FRESH_TOKENS, _FRESH_TOKENS_PER_SESSION * num_sessions),
            )
        self._load = self._loads[self._load_class]

    def _trial_of(self, method: str) -> _Trial:
        """At this load."""
        trial = self._load.trials.setdefault(method, _Trial())
        if not trial.is_judged:
            known = self._other_trials(method)
            judged = [other for other in known if other < self._load_class and known[other].is_judged]
            if judged and known[max(judged)].has_clearly_lost:
                trial.mute(self._load.first_mute_tokens, is_clear=True)
        return trial

    def _other_trials(self, method: str) -> dict[int, _Trial]:
        """The method's at the other load classes where it has been tried."""
        loads = self._loads.items()
        return {other: load.trials[method] for other, load in loads if load is not self._load and method in load.trials}

    def _can_assume_win(self, method: str, trial: _Trial) -> bool:
        """Whether nothing is judged here, and it has won at a higher load, or clearly at a neighbouring one."""
        known, own = self._other_trials(method), self._load_class
        near = [other for load_class, other in known.items() if abs(load_class - own) <= LOADS_PER_DOUBLING]
        lost = any(other.has_clearly_lost or other.mute_left > 0 for other in near)
        won = any(other.has_clearly_won for other in near)
        won_with_more = any(other.has_won for load_class, other in known.items() if load_class > own)
        return not trial.is_judged and not lost and (won or won_with_more)

    def _track_change(self, outcome: RoundOutcome, share: float) -> None:
        """Whether the sessions draft now, and whether the last change has settled."""
        self._rounds_since_draft = 0.0 if outcome.num_asked else self._rounds_since_draft + share
        self._drafting_share += 0.5 * share * ((outcome.num_asked > 0) - self._drafting_share)
        is_drafting = self._rounds_since_draft < 2.0
        if is_drafting != self._is_drafting:
            self._is_drafting, self._rounds_since_change, self._has_settled = is_drafting, 0.0, False
            return
        self._rounds_since_change += share
        has_share = not is_drafting or self._drafting_share >= _SETTLED_SHARE
        settled_after = _SETTLE_ROUNDS if has_share else _LONGEST_SETTLE_ROUNDS
        self._has_settled |= self._rounds_since_change >= settled_after

    def _compare(self, method: str, trial: _Trial) -> None:
        load, num_session_rounds = self._load, trial.drafting.num_session_rounds
        is_early = num_session_rounds < _FIRST_SESSION_ROUNDS or trial.drafting.count < _DRAFTING_ROUNDS
        if is_early or (num_session_rounds < _MANY_SESSION_ROUNDS and self._can_assume_win(method, trial)):
            return
        if load.plain.count < _PLAIN_ROUNDS:
            self._plain_rounds_left = self._plain_rounds_left or _PLAIN_ROUNDS
            return
        ratio = trial.drafting.tokens_per_s / load.plain.tokens_per_s
        noise = _error(trial.drafting, load.plain)
        error = 0.0 if num_session_rounds >= _MANY_SESSION_ROUNDS else noise
        has_lost = ratio < 1.0 - _LOSS_ERRORS * error
        is_close = 1.0 - _LOSS_ERRORS * noise <= ratio < 1.0 + _WIN_ERRORS * noise
        if is_close and num_session_rounds >= _MANY_SESSION_ROUNDS and load.plain.count < _MANY_PLAIN_ROUNDS:
            self._plain_rounds_left = self._plain_rounds_left or _MANY_PLAIN_ROUNDS - load.plain.count
        elif has_lost and not (trial.is_judged or trial.is_suspect):
            trial.is_suspect, trial.drafting = True, _DraftingRounds()
        elif has_lost:
            trial.mute(load.first_mute_tokens, is_clear=ratio < 1.0 - _WIN_ERRORS * error)
        elif ratio > 1.0 + _WIN_ERRORS * error:
            trial.mute_tokens = 0
            trial.is_judged, trial.has_clearly_lost = True, False
            trial.has_won, trial.has_clearly_won = True, ratio > _WINS_CLEARLY
        if load.plain_age > (_LONG_FRESH_TOKENS if ratio > _WINS_BY_FAR else load.fresh_tokens):
            load.plain = _Rounds()


def _error(drafting: _Rounds, plain: _Rounds) -> float:
    """Standard error of the ratio of the two rates."""
    rounds = _ROUND_SPREAD * math.sqrt(1.0 / drafting.count + 1.0 / plain.count)
    return math.hypot(_TOKEN_SPREAD / math.sqrt(drafting.num_session_rounds), rounds)
