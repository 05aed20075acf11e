"""Whether drafting has in fact brought more tokens a second than not drafting, at the load that there is.

The costs that `auto` decides by (draft_costs) leave things out: a drafter on the verifier's machine takes its cores and
its memory bandwidth, and sessions wait for each other. So the outcome itself is measured: the verifier's rounds while
sessions draft against its rounds while none does, per number of open sessions (not of those in a forward: drafting
splits them). Where drafting loses, nobody drafts for a while; twice as long after each further loss. Rounds with drafts
are forgotten slowly, but within some hundred rounds when other requests have come, which gain more or less. A load of
which nothing is known yet is taken to be like the next lower one that was judged: where drafts clearly did not pay with
fewer sessions, they will hardly pay with more.

Not here: how many tokens to draft where it pays.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gateway.draft_policy import RoundOutcome
from shared.loads import LOADS_PER_DOUBLING, load_of

# Rounds after a change between drafting and not that tell of neither; after one to drafting, it takes until most
# sessions have drafts (methods read what was decoded without them, one session after the other), but no longer than so.
_SETTLE_ROUNDS = 4.0
_MOST_SESSIONS = 0.75
_LONGEST_SETTLE_ROUNDS = 48.0
# Rounds without drafts that a comparison needs, and where it is close after many rounds with drafts, as a small loss
# counts then; and rounds with drafts.
_PLAIN_ROUNDS = 12.0
_MANY_PLAIN_ROUNDS = 48.0
_DRAFTING_ROUNDS = 12.0
# Sessions times rounds with drafts before the first comparison, and before a loss counts however small it is.
_FIRST_ROUNDS = 48.0
_MANY_ROUNDS = 1600.0
# Spread of the tokens of one session's round over their mean, with drafts, and of the seconds of a round. With many
# sessions the second one decides: 48 rounds of sessions are one and a half of 32, and those were judged by.
_SPREAD = 0.6
_ROUND_SPREAD = 0.1
# Standard errors by which drafting must have lost, or won. A small loss is what the promise is broken by, and with two
# it took 400 rounds to find one of 6 %; a small gain that is missed by chance for a while is no great matter.
_ERRORS_OF_A_LOSS = 1.25
_ERRORS_OF_A_WIN = 2.0
# Rounds are forgotten after so many.
_MEMORY_ROUNDS = 400.0
# Unless two stretches of this many, and of so many rounds of single sessions, differ from what is remembered by more
# standard errors than this, both in one direction: one alone may be of a few answers that are hard to draft for.
_STRETCH_ROUNDS = 64.0
_STRETCH_SEEN = 512.0
_ERRORS_OF_A_CHANGE = 2.5
# Tokens of all sessions that a comparison is good for, at least, and for each session; and while drafting wins by far.
_FRESH_TOKENS = 20_000
_FRESH_TOKENS_PER_SESSION = 2_500
_LONG_FRESH_TOKENS = 200_000
_WINS_BY_FAR = 1.3
# With this much more, drafting will hardly lose at a load beside: it is not stopped there soon to be compared.
_WINS_CLEARLY = 1.15
# Tokens of all sessions without drafts after a loss, at least, and for each session: all of them lose by the next try.
_FIRST_MUTE_TOKENS = 4_000
_MUTE_TOKENS_PER_SESSION = 500
_LONGEST_MUTE_TOKENS = 128_000


@dataclass
class _Rounds:
    """Tokens and seconds of rounds of one kind."""

    tokens: float = 0.0
    seconds: float = 0.0
    count: float = 0.0
    # Rounds of single sessions.
    num_seen: float = 0.0

    def add(self, outcome: RoundOutcome, share: float) -> None:
        keep = 1.0 - share / _MEMORY_ROUNDS if self.count >= _MEMORY_ROUNDS else 1.0
        self.tokens = keep * self.tokens + share * outcome.round_tokens
        self.seconds = keep * self.seconds + share * outcome.round_s
        self.count = keep * self.count + share
        self.num_seen = keep * self.num_seen + 1.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass
class _DraftingRounds(_Rounds):
    """Those with drafts: their rate is that of the requests that there are, and changes with them."""

    _stretch: _Rounds = field(default_factory=_Rounds)
    # The stretch before, if it differed; and whether by more tokens a second.
    _differed: _Rounds | None = None
    _was_more: bool = False

    def add(self, outcome: RoundOutcome, share: float) -> None:
        super().add(outcome, share)
        self._stretch.add(outcome, share)
        if self._stretch.count >= _STRETCH_ROUNDS and self._stretch.num_seen >= _STRETCH_SEEN:
            self._follow_change()
            self._stretch = _Rounds()

    def _follow_change(self) -> None:
        """When greedy requests became random ones, for which n-grams bring 0.96 instead of 1.2, the memory of 400
        rounds kept all 8 sessions at drafting for 11,000 tokens."""
        ratio = self._stretch.tokens_per_s / self.tokens_per_s
        differs = abs(ratio - 1.0) > _ERRORS_OF_A_CHANGE * _error(self._stretch, self)
        if differs and self._differed and (ratio > 1.0) == self._was_more:
            new = (self._stretch, self._differed)
            self.tokens, self.seconds = sum(part.tokens for part in new), sum(part.seconds for part in new)
            self.count, self.num_seen = sum(part.count for part in new), sum(part.num_seen for part in new)
            differs = False
        self._differed, self._was_more = self._stretch if differs else None, ratio > 1.0


@dataclass
class _Load:
    """What is known at one number of sessions."""

    first_mute_tokens: int = _FIRST_MUTE_TOKENS
    fresh_tokens: int = _FRESH_TOKENS
    plain: _Rounds = field(default_factory=_Rounds)
    drafting: _DraftingRounds = field(default_factory=_DraftingRounds)
    # Tokens since `plain` was measured, and until drafting may be tried again.
    plain_age: int = 0
    mute_left: int = 0
    # The next pause; 0: the first.
    mute_tokens: int = 0
    # What the last comparison has said, here or, before there was one, at a lower load.
    is_judged: bool = False
    has_clearly_lost: bool = False
    # Whether it has won, and by far.
    has_won: bool = False
    has_won_by_far: bool = False
    # Whether drafting seemed to lose in its first rounds, in which a server that has just started prepares much.
    is_suspect: bool = False

    def mute(self, *, is_clear: bool) -> None:
        self.mute_left = self.mute_tokens or self.first_mute_tokens
        self.mute_tokens = min(2 * self.mute_left, _LONGEST_MUTE_TOKENS)
        self.is_judged, self.has_clearly_lost = True, is_clear
        self.has_won = self.has_won_by_far = False
        self.drafting = _DraftingRounds()


class GoodputGuard:
    """Shared by all sessions of a gateway."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}
        self._load = _Load()
        self._is_drafting = False
        self._drafted_share = 0.0  # of the sessions, over the last rounds
        self._has_settled = True
        self._rounds_since_change = 0.0
        self._rounds_since_draft = _SETTLE_ROUNDS
        # Rounds without drafts that a comparison still waits for.
        self._plain_rounds_left = 0.0

    def allows_drafts(self) -> bool:
        return self.mute_tokens_left <= 0 and self._plain_rounds_left <= 0.0

    @property
    def mute_tokens_left(self) -> int:
        """Tokens of all sessions until drafting may be tried again; 0 or less where it is not muted."""
        return self._load.mute_left

    @property
    def plain_tokens_per_s(self) -> float | None:
        """The verifier's rate at this load while nobody drafts; None while too little of it has been seen."""
        plain = self._load.plain
        return plain.tokens_per_s if plain.count >= _PLAIN_ROUNDS else None

    def observe(self, outcome: RoundOutcome) -> None:
        """A commit of any session that is free to draft or not."""
        self._load = self._load_of(max(1, outcome.open_sessions, outcome.batch_sessions))
        share = 1.0 / max(1, outcome.batch_sessions)  # of a round, which every session in it reports
        self._load.plain_age += 1 + outcome.num_accepted
        self._load.mute_left -= 1 + outcome.num_accepted
        self._follow(outcome, share)
        if outcome.round_tokens <= 0 or outcome.round_s <= 0.0 or not self._has_settled:
            return
        if self._is_drafting:
            if self._load.mute_left <= 0:  # else drafts of before the pause, whose loss has been counted
                self._load.drafting.add(outcome, share)
                self._compare()
        else:
            self._load.plain.add(outcome, share)
            self._load.plain_age = 0
            self._plain_rounds_left = max(0.0, self._plain_rounds_left - share)

    def _load_of(self, num_sessions: int) -> _Load:
        place = load_of(num_sessions)
        if place not in self._loads:
            self._loads[place] = _Load(
                max(_FIRST_MUTE_TOKENS, _MUTE_TOKENS_PER_SESSION * num_sessions),
                max(_FRESH_TOKENS, _FRESH_TOKENS_PER_SESSION * num_sessions),
            )
        load = self._loads[place]
        if not load.is_judged:
            judged = [lower for lower, known in self._loads.items() if lower < place and known.is_judged]
            if judged and self._loads[max(judged)].has_clearly_lost:
                load.mute(is_clear=True)
        return load

    def _is_near_a_win(self) -> bool:
        """Whether nothing is known of this load, and drafting has won with more sessions, or by far with about as
        many."""
        place = next(place for place, load in self._loads.items() if load is self._load)
        near = [load for other, load in self._loads.items() if 0 < abs(other - place) <= LOADS_PER_DOUBLING]
        lost = any(load.has_clearly_lost or load.mute_left > 0 for load in near)
        won = any(load.has_won_by_far for load in near)
        won_with_more = any(load.has_won for other, load in self._loads.items() if other > place)
        return not self._load.is_judged and not lost and (won or won_with_more)

    def _follow(self, outcome: RoundOutcome, share: float) -> None:
        """Whether the sessions draft now, and whether they have done so for long enough to tell."""
        self._rounds_since_draft = 0.0 if outcome.num_asked else self._rounds_since_draft + share
        self._drafted_share += 0.5 * share * ((outcome.num_asked > 0) - self._drafted_share)
        is_drafting = self._rounds_since_draft < 2.0
        if is_drafting != self._is_drafting:
            self._is_drafting, self._rounds_since_change, self._has_settled = is_drafting, 0.0, False
            return
        self._rounds_since_change += share
        most_do = not is_drafting or self._drafted_share >= _MOST_SESSIONS
        settled_after = _SETTLE_ROUNDS if most_do else _LONGEST_SETTLE_ROUNDS
        self._has_settled |= self._rounds_since_change >= settled_after

    def _compare(self) -> None:
        load, num_seen = self._load, self._load.drafting.num_seen
        is_early = num_seen < _FIRST_ROUNDS or load.drafting.count < _DRAFTING_ROUNDS
        if is_early or (num_seen < _MANY_ROUNDS and self._is_near_a_win()):
            return
        if load.plain.count < _PLAIN_ROUNDS:
            self._plain_rounds_left = self._plain_rounds_left or _PLAIN_ROUNDS
            return
        ratio = load.drafting.tokens_per_s / load.plain.tokens_per_s
        noise = _error(load.drafting, load.plain)
        error = 0.0 if num_seen >= _MANY_ROUNDS else noise
        has_lost = ratio < 1.0 - _ERRORS_OF_A_LOSS * error
        is_close = 1.0 - _ERRORS_OF_A_LOSS * noise <= ratio < 1.0 + _ERRORS_OF_A_WIN * noise
        if is_close and num_seen >= _MANY_ROUNDS and load.plain.count < _MANY_PLAIN_ROUNDS:
            self._plain_rounds_left = self._plain_rounds_left or _MANY_PLAIN_ROUNDS - load.plain.count
        elif has_lost and not (load.is_judged or load.is_suspect):
            load.is_suspect, load.drafting = True, _DraftingRounds()
        elif has_lost:
            load.mute(is_clear=ratio < 1.0 - _ERRORS_OF_A_WIN * error)
        elif ratio > 1.0 + _ERRORS_OF_A_WIN * error:
            load.mute_tokens = 0
            load.is_judged, load.has_clearly_lost = True, False
            load.has_won, load.has_won_by_far = True, ratio > _WINS_CLEARLY
        if load.plain_age > (_LONG_FRESH_TOKENS if ratio > _WINS_BY_FAR else load.fresh_tokens):
            load.plain = _Rounds()


def _error(drafting: _Rounds, plain: _Rounds) -> float:
    """Standard error of the ratio of the two rates."""
    rounds = _ROUND_SPREAD * math.sqrt(1.0 / drafting.count + 1.0 / plain.count)
    return math.hypot(_SPREAD / math.sqrt(drafting.num_seen), rounds)
