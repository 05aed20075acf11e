"""`auto`: the method and the number of draft tokens of the next round, for all sessions of a verifier together.

A forward waits for the sessions that draft, so all of them pay when some draft, or one drafts longer. Not here: how
drafts are made (local_drafting), or asked of a drafter (gateway/proposals).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from outrider.verifier_service.draft_length.acceptance import Acceptance
from outrider.verifier_service.draft_length.costs import DraftTime, LoadCosts, MethodCosts
from outrider.verifier_service.draft_length.ledger import Ledger
from outrider.verifier_service.draft_length.limits import (
    COST_WEIGHT,
    CREDIT_ROUNDS,
    LOADS_PER_DOUBLING,
    LOOK_DRAFTS,
    LOOK_LENGTH,
    LOOK_ROUNDS,
    LOOK_SESSIONS,
    MIN_GAIN,
    OUTLIER,
    PLAIN_ROUNDS,
    RATE_MEMORY,
    SETTLE_ROUNDS,
)

# (sessions in a forward, mean draft tokens of each) -> seconds that the drafts add to it
RowsS = Callable[[float, float], float]
_Session = TypeVar("_Session")


class Choice(NamedTuple):
    """A draft method and length. method: "" with no draft tokens."""

    method: str
    num_draft_tokens: int


PLAIN = Choice("", 0)


@dataclass(frozen=True, slots=True)
class Drafted:
    """One session's draft in a round. num_proposed: 0 if no draft was found, or none came in time."""

    method: str
    num_asked: int
    num_proposed: int
    num_accepted: int


@dataclass(frozen=True, slots=True)
class RoundSample:
    """A forward and what it committed.

    num_sessions: those in it that decode. num_open: at the verifier. tokens, seconds: since the forward before it; 0:
    not meaningful. drafts: of the sessions that were to draft. draft_s: of making, or waiting for, them; travel_s: the
    part of it that messages took. is_catch_up: whether methods first had to read much. is_own: whether it has sessions
    for which the policy chose; others draft as their users say, and what they lose is not the policy's loss.
    """

    num_sessions: int
    num_open: int
    tokens: int
    seconds: float
    drafts: Sequence[Drafted] = ()
    draft_s: float = 0.0
    travel_s: float = 0.0
    is_catch_up: bool = False
    is_own: bool = True


@dataclass
class Look:
    """A trial of a choice other than the usual one. cost_s: excess over the usual choice's time for the same tokens."""

    at: Choice
    usual_gain: float
    cost_s: float = 0.0
    num_rounds: int = 0
    num_drafts: int = 0

    def observe(self, sample: RoundSample, seconds: float, plain_tokens_per_s: float) -> None:
        self.num_rounds += 1
        self.num_drafts += len(sample.drafts)
        self.cost_s += seconds - sample.tokens / (plain_tokens_per_s * self.usual_gain)


@dataclass
class DraftLength:
    """Chooses the draft method and length of each round: `decide` before it, `observe` after it.

    Belongs to the engine's thread. rows_s: as RowsS. one_pass: methods whose drafts come from one forward. max_round_s:
    bounds a round with drafts.
    """

    rows_s: RowsS
    one_pass: frozenset[str] = frozenset()
    max_round_s: float = math.inf
    now: Choice = PLAIN
    ledger: Ledger = field(default_factory=Ledger)
    _acceptance: dict[str, Acceptance] = field(default_factory=dict)
    _loads: dict[int, LoadCosts] = field(default_factory=dict)
    _load: LoadCosts | None = None
    _latest_times: dict[str, DraftTime] = field(default_factory=dict)
    _usual: Choice = PLAIN
    _look: Look | None = None
    _rounds_since_change: int = 0
    _num_rounds: int = 0

    def decide(self, limits: Mapping[str, int]) -> Choice:
        """Chooses for the next round. limits: available method -> most tokens it may draft, best guess first."""
        load, choice = self._load, PLAIN
        if load is not None and limits and load.plain.count >= PLAIN_ROUNDS:
            choice = self._decide(load, limits)
        if choice.method != self.now.method:
            self._rounds_since_change = 0
            if choice.method:
                self._of(choice.method).begin()
        self.now = choice
        return choice

    def that_draft(self, sessions: Sequence[_Session], num_unread: Callable[[_Session], int]) -> Sequence[_Session]:
        """Returns the sessions that draft with the current choice.

        All of them; but in a look, while nothing is drafted usually, the few that have the least to read. num_unread:
        tokens that the choice's method has to read first.
        """
        if self._look is None or self._usual.method:
            return sessions
        return heapq.nsmallest(LOOK_SESSIONS, sessions, key=num_unread)

    @property
    def plain_round_s(self) -> float:
        """Seconds of a round without drafts at the newest load; 0: not known yet."""
        return self._load.plain.mean_s if self._load is not None and self._load.plain.count else 0.0

    @property
    def patience_s(self) -> float:
        """Seconds that the current choice's draft is worth waiting for: its gain if all of it is accepted."""
        return self.now.num_draft_tokens * self.plain_round_s

    def observe(self, sample: RoundSample) -> None:
        """Learns from the round that was decided last."""
        load = self._enter(sample.num_open)
        plain_s = load.plain.mean_s if load.plain.count else 0.0
        methods = {draft.method for draft in sample.drafts}
        length = max((draft.num_asked for draft in sample.drafts), default=0)
        for name in methods:
            drafts = [draft for draft in sample.drafts if draft.method == name]
            found = [(draft.num_accepted, draft.num_proposed) for draft in drafts if draft.num_proposed]
            self._of(name).observe(found, len(drafts), max(draft.num_asked for draft in drafts))
        load.batch_sessions += COST_WEIGHT * (sample.num_sessions - load.batch_sessions)
        charged_s = self._charged_s(load, sample, methods, length) if plain_s else sample.seconds
        self._rounds_since_change += 1
        self._num_rounds += 1
        most_drafted = 2 * len(sample.drafts) > sample.num_sessions
        if len(methods) == 1 and not sample.is_catch_up:
            self._costs(load, *methods).time.observe(length, sample.draft_s, sample.travel_s, of_few=not most_drafted)
        if sample.seconds <= 0.0 or sample.tokens <= 0:
            return
        # A round in which no session could draft, as the first after a prompt, says little of plain decoding.
        is_plain = not methods and not self.now.method
        if plain_s and sample.is_own:
            # A plain round costs what it costs: its noise is no loss.
            plain_seconds = charged_s if is_plain else sample.tokens / load.plain.tokens_per_s
            self.ledger.observe(plain_seconds, charged_s, plain_s)
        load.since_look_s += sample.seconds
        load.since_plain_s = 0.0 if is_plain else load.since_plain_s + sample.seconds
        paid_s = self.ledger.look_share(is_drafting=bool(self._usual.method)) * sample.seconds
        load.look_debt_s = max(-CREDIT_ROUNDS * load.plain.mean_s if plain_s else 0.0, load.look_debt_s - paid_s)
        if self._look is not None:
            self._look.observe(sample, charged_s, load.plain.tokens_per_s)
        if self._rounds_since_change <= SETTLE_ROUNDS and load.plain.count:
            return
        if is_plain:
            load.plain.add(sample.tokens, sample.seconds)
        elif len(methods) == 1 and plain_s and most_drafted:
            self._costs(load, *methods).drafted.add(sample.tokens, sample.seconds)
            modelled_s = self._modelled_s(load, next(iter(methods)), length)
            self._costs(load, *methods).modelled.add(0.0, modelled_s)

    def _charged_s(self, load: LoadCosts, sample: RoundSample, methods: Collection[str], length: int) -> float:
        """Returns the seconds of a round that the account and a look are charged with: no outlier's.

        A kernel that is compiled, or a graph that is captured, takes as long as hundreds of rounds, once. Catching up
        with a prompt is charged whole: every session does it.
        """
        if sample.is_catch_up:
            return sample.seconds
        usual_s = max((self._modelled_s(load, name, length) for name in methods), default=load.plain.mean_s)
        return min(sample.seconds, OUTLIER * usual_s)

    def _modelled_s(self, load: LoadCosts, method: str, length: int) -> float:
        """Returns the seconds of a round with drafts of `length` tokens, by the model."""
        costs = self._costs(load, method)
        rows_s = self._rows_s(load, costs, length, self._of(method).proposed)
        return load.plain.mean_s + rows_s[length] + costs.time.seconds(length)

    def observe_plain(self, num_open: int, tokens: int, seconds: float) -> None:
        """Learns from a round of sessions that all decode without drafts by their own wish: it is no look's."""
        load = self._enter(num_open)
        if seconds > 0.0 and tokens > 0:
            load.plain.add(tokens, seconds)
            load.since_plain_s = 0.0

    # ---- the usual choice ----

    def _decide(self, load: LoadCosts, limits: Mapping[str, int]) -> Choice:
        allowed = self.ledger.allows_drafts(load.plain.mean_s)
        if self._look is not None:
            if self._goes_on(self._look, load, limits):
                return self._look.at
            self._end_look(load)
            allowed = self.ledger.allows_drafts(load.plain.mean_s)
        gains = self._all_gains(load, limits)
        self._usual, usual_gain = self._best(gains) if allowed else (PLAIN, 1.0)
        self._look = self._next_look(load, limits, gains, usual_gain)
        return self._usual if self._look is None else self._look.at

    def _best(self, gains: Mapping[str, Sequence[float]]) -> tuple[Choice, float]:
        """Returns the choice with the largest gain, and its gain; the usual one while none is better by MIN_GAIN."""
        best = [(_best_length(gains[name]), name) for name in gains if self._of(name).is_known]
        if not best:
            return PLAIN, 1.0
        (length, method) = max(best, key=lambda found: gains[found[1]][found[0]])
        usual = self._usual
        kept = gains.get(usual.method, ())
        if usual.num_draft_tokens < len(kept) and gains[method][length] <= (1.0 + MIN_GAIN) * kept[usual[1]]:
            method, length = usual
        gain = gains[method][length]
        return (Choice(method, length), gain) if gain > 1.0 + MIN_GAIN else (PLAIN, 1.0)

    def _all_gains(self, load: LoadCosts, limits: Mapping[str, int]) -> Mapping[str, Sequence[float]]:
        """Returns each method's gains, up to LOOK_ROUNDS rounds old: computing them takes longer than a cheap draft."""
        if load.gains_limits != limits or self._num_rounds >= load.gains_at + LOOK_ROUNDS:
            load.gains = {name: self._gains(load, name, most) for name, most in limits.items()}
            load.gains_limits, load.gains_at = dict(limits), self._num_rounds
        return load.gains

    def _gains(self, load: LoadCosts, method: str, most: int, errors: float = 0.0) -> list[float]:
        """Returns the rate relative to plain decoding by draft length, from 0 on. errors: as in Acceptance.tokens."""
        costs, acceptance = self._costs(load, method), self._of(method)
        plain_s, slowness = load.plain.mean_s, costs.slowness
        rows_s, gains = self._rows_s(load, costs, most, acceptance.proposed), [1.0]
        for length, tokens in enumerate(acceptance.tokens(most, errors)[1:], 1):
            round_s = slowness * (plain_s + rows_s[length] + costs.time.seconds(length))
            gains.append(tokens * plain_s / round_s if round_s <= self.max_round_s else 0.0)
        return gains

    def _rows_s(self, load: LoadCosts, costs: MethodCosts, most: int, proposed: float) -> Sequence[float]:
        """Returns the seconds that drafts add to a forward, by length up to at least `most`.

        They are up to LOOK_ROUNDS rounds old.
        """
        if len(costs.rows_s) <= most or self._num_rounds >= costs.rows_at + LOOK_ROUNDS:
            sessions = load.batch_sessions
            costs.rows_s = [0.0, *(self.rows_s(sessions, length * proposed) for length in range(1, most + 1))]
            costs.rows_at = self._num_rounds
        return costs.rows_s

    # ---- looks at the other choices ----

    def _next_look(
        self, load: LoadCosts, limits: Mapping[str, int], gains: Mapping[str, Sequence[float]], usual_gain: float
    ) -> Look | None:
        """Returns the look that is due: one that is paid for beforehand, or that may gain and has credit.

        What may gain waits until past looks are paid for, unless it is untried.
        """
        plain_s = load.plain.mean_s
        # Judged with the gains, every LOOK_ROUNDS rounds: that takes longer than a cheap draft.
        if load.since_look_s < 4 * LOOK_ROUNDS * plain_s or load.gains_at != self._num_rounds:
            return None
        if load.look_debt_s > 0.0 and all(self._of(name).is_known for name in limits):
            return None
        at, bound = self._look_at(load, limits, gains, usual_gain)
        if at == self._usual:
            return None
        gain = gains[at.method][at.num_draft_tokens] if at.method else 1.0
        num_rounds = SETTLE_ROUNDS + (LOOK_ROUNDS if at.method else PLAIN_ROUNDS)
        share = 1.0 if self._usual.method else min(1.0, LOOK_SESSIONS / max(1.0, load.batch_sessions))
        expected_s = num_rounds * plain_s * share * max(0.0, 1.0 - gain / usual_gain)
        is_paid = load.look_debt_s + expected_s <= 0.0
        is_untried = bool(at.method) and not self._of(at.method).is_known
        may_gain = not at.method or bound > usual_gain
        has_credit = self.ledger.credit_s > expected_s and (is_untried or load.look_debt_s <= 0.0)
        return Look(at, usual_gain) if is_paid or (may_gain and has_credit) else None

    def _look_at(
        self, load: LoadCosts, limits: Mapping[str, int], gains: Mapping[str, Sequence[float]], usual_gain: float
    ) -> tuple[Choice, float]:
        """Returns the choice to look at, and the upper bound of its gain; the usual choice if there is none.

        It is an untried method that may gain; plain decoding, if it has not been measured for long; or the method with
        the highest upper bound, while something is drafted only if that is above the usual gain.
        """
        usual = self._usual
        bounds = {name: max(self._gains(load, name, limits[name], 1.0)[1:]) for name in limits if name != usual.method}
        untried = (name for name in limits if name in bounds and not self._of(name).is_known)
        promising = next((name for name in untried if bounds[name] > usual_gain), None)
        if promising is not None:
            return Choice(promising, min(LOOK_LENGTH, limits[promising])), bounds[promising]
        if usual.method and load.since_plain_s > RATE_MEMORY * load.plain.mean_s:
            return PLAIN, 1.0
        name = max(bounds, key=lambda name: bounds[name], default="")
        if not name or (usual.method and bounds[name] <= usual_gain):
            return usual, usual_gain
        return Choice(name, min(max(LOOK_LENGTH, _best_length(gains[name])), limits[name])), bounds[name]

    def _goes_on(self, look: Look, load: LoadCosts, limits: Mapping[str, int]) -> bool:
        if look.at.method not in ("", *limits):
            return False
        if not look.at.method:
            return look.num_rounds < SETTLE_ROUNDS + PLAIN_ROUNDS
        if look.num_rounds < SETTLE_ROUNDS + LOOK_ROUNDS:
            return True
        if self.ledger.credit_s <= 0.0 or min(look.num_drafts, look.num_rounds) >= LOOK_DRAFTS:
            return False
        gain, bound = (
            max(self._gains(load, look.at.method, limits[look.at.method], errors)[1:]) for errors in (0.0, 1.0)
        )
        return gain <= (1.0 + MIN_GAIN) * look.usual_gain < bound

    def _end_look(self, load: LoadCosts) -> None:
        look, self._look = self._look, None
        if look is None:
            return
        load.since_look_s, load.gains_limits = 0.0, None
        load.look_debt_s += max(0.0, look.cost_s)
        if look.at.method and look.cost_s < 0.0:
            load.look_debt_s += self.ledger.look_gained(load.plain.mean_s)

    # ---- what is known ----

    def _of(self, method: str) -> Acceptance:
        return self._acceptance.setdefault(method, Acceptance())

    def _enter(self, num_open: int) -> LoadCosts:
        load_class = round(LOADS_PER_DOUBLING * math.log2(max(1, num_open)))
        load = self._loads.setdefault(load_class, LoadCosts(batch_sessions=float(num_open)))
        if load is not self._load:
            self._load, self._look = load, None  # what a look has shown was of another load
        return load

    def _costs(self, load: LoadCosts, method: str) -> MethodCosts:
        if method not in load.methods:
            nearest = self._latest_times.get(method, DraftTime(method in self.one_pass))
            load.methods[method] = MethodCosts(nearest.copy())
        self._latest_times[method] = load.methods[method].time
        return load.methods[method]


def _best_length(gains: Sequence[float]) -> int:
    """Returns the length of the largest gain, at least 1."""
    return max(range(1, len(gains)), key=lambda length: gains[length])
