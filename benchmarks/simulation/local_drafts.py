"""A verifier in simulated time that drafts locally, as verifier_service/local_drafting.py does: all sessions that
ask, in one batch, before a forward. And a session of such a verifier: one run from its prefill to its end.

Not simulated: several methods at once, trees, the catch-up of prompts in pieces (prompts are shorter than one).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.costs import Costs, Table
from benchmarks.simulation.events import Events
from benchmarks.simulation.rounds import DraftLengths, RoundTimes, SessionRound
from benchmarks.simulation.verifier import SimulatedSession, SimulatedVerifier, seconds_by_rows
from benchmarks.simulation.worlds.text import Text
from outrider.drafting.session import LONG_REPORT
from outrider.verifier_service.timing.gathering import LastRound


@dataclass(frozen=True)
class DraftPrices:
    """Seconds of a method's proposals.

    step: (rows of a forward, seconds), one forward per place of a draft; fixed_s: of a proposal beyond its forwards.
    one_forward: whole drafts come from one forward (Medusa). reads: it has to read what it has not drafted itself.
    """

    step: Table
    fixed_s: float
    one_forward: bool = False
    reads: bool = True


@dataclass
class Count:
    """Counts of one verifier since the last reset: what its sessions have done, and the time that they were open."""

    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted_rounds: int = 0
    num_draft_tokens: int = 0
    session_s: float = 0.0
    num_open: int = 0
    _changed_at: float = 0.0

    def change(self, difference: int, now: float) -> None:
        """Sessions begin or end."""
        self.session_s += self.num_open * (now - self._changed_at)
        self.num_open += difference
        self._changed_at = now

    def reset(self, now: float) -> None:
        self.num_tokens = self.num_rounds = self.num_drafted_rounds = self.num_draft_tokens = 0
        self.session_s, self._changed_at = 0.0, now


@dataclass(eq=False, slots=True)
class LocalSession(SimulatedSession):
    """A request. texts: by method, how good its drafts are. start: where its output stands in them. max_tokens: its
    length.
    """

    events: Events
    costs: Costs
    verifier: SimulatedVerifier
    drafting: LocalDrafting
    count: Count
    texts: Mapping[str, Text]
    start: int
    max_tokens: int
    on_end: Callable[[], None]
    method: str = ""
    num_wanted: int = 0
    num_committed: int = 0
    num_prompt_rows: int = 0
    # Tokens of prompt and output that each method has read.
    num_read: dict[str, int] = field(default_factory=dict)

    def begin(self) -> None:
        """The request is at the gateway now."""
        self.count.change(1, self.events.now)
        self.opened_at = self.events.now
        self.num_prompt_rows, self.free_run_left = self.num_pending, self.max_tokens
        self.events.after(0.5 * self.costs.request_s, self._open)

    def _open(self) -> None:
        self.verifier.open(self)
        self.drafting.lengths.opened(self)
        self.events.after(0.5 * self.costs.verifier_trip_s, self.verifier.submit, self)

    @property
    def num_wanted_rows(self) -> int:
        return self.num_pending + self.num_wanted

    def accept(self) -> int:
        num_accepted = 0
        if self.num_draft_tokens:
            position = self.start + self.num_committed
            num_accepted = self.texts[self.method].accepted(position, self.num_draft_tokens, self.events.now)
        self.num_committed += num_accepted + 1
        return num_accepted + 1

    @property
    def num_tokens_known(self) -> int:
        return self.num_prompt_rows + self.num_committed

    def num_unread(self, method: str) -> int:
        """Tokens that the method has to read before it drafts."""
        return self.num_tokens_known - self.num_read.get(method, 0)

    def is_finished(self) -> bool:
        return self.num_committed >= self.max_tokens

    def committed(self, num_tokens: int, times: RoundTimes, *, more: bool) -> None:
        num_proposed, num_asked = self.num_draft_tokens, self.num_asked
        self.num_draft_tokens = self.num_asked = 0
        if num_proposed:  # a draft's tokens are in the drafter's cache, but for the last one
            self.num_read[self.method] = self.num_tokens_known - 1 - (num_tokens > num_proposed)
        count = self.count
        count.num_tokens += num_tokens
        count.num_rounds += 1
        count.num_drafted_rounds += num_proposed > 0
        count.num_draft_tokens += num_proposed
        base_len = self.num_committed - num_tokens
        self.drafting.members.append(
            SessionRound(self, times, base_len, num_asked, num_proposed, num_tokens, more, self.method)
        )
        if not more:
            self.events.after(0.5 * (self.costs.verifier_trip_s + self.costs.request_s), self._end)

    def _end(self) -> None:
        self.count.change(-1, self.events.now)
        self.on_end()

    def proposed(self, total_s: float) -> None:
        raise NotImplementedError("no drafter is asked: the verifier drafts locally")


@dataclass(eq=False)
class LocalDrafting:
    """The local drafting of one verifier. prices: by method. waited_s: for no drafter."""

    prices: Mapping[str, DraftPrices]
    lengths: DraftLengths
    waited_s: float = 0.0
    # Of the round that is being settled.
    members: list[SessionRound] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._step_s = {method: seconds_by_rows(prices.step) for method, prices in self.prices.items()}

    def draft(self, sessions: Iterable[LocalSession]) -> float:
        """Sets the draft of everyone whose next round is to have one; returns seconds."""
        waiting = [session for session in sessions if session.step is not None]
        self.lengths.decide(waiting)
        asked: dict[str, list[LocalSession]] = {}
        for session in waiting:
            if session.num_wanted and session.num_pending == 1:
                session.num_asked = max(0, min(session.num_wanted, session.max_tokens - session.num_committed - 1))
                if session.num_asked:
                    asked.setdefault(session.method, []).append(session)
        seconds = 0.0
        for method, members in asked.items():
            seconds += self._reading_s(method, members) + self._propose_s(method, members)
            for session in members:
                position = session.start + session.num_committed
                found = session.texts[method].is_found(position, session.events.now)
                session.num_draft_tokens = session.num_asked if found else 0
                session.num_read[method] = session.num_tokens_known
        return seconds

    def _reading_s(self, method: str, asked: Sequence[LocalSession]) -> float:
        """Prompts, and what was decoded without drafts, session by session."""
        if not self.prices[method].reads:
            return 0.0
        unread = [session.num_unread(method) for session in asked]
        return sum(self._step_s[method](number) for number in unread if number > LONG_REPORT)

    def _propose_s(self, method: str, asked: Sequence[LocalSession]) -> float:
        """A forward per depth over those who still draft; the first computes what was committed meanwhile."""
        prices, step_s, rows = self.prices[method], self._step_s[method], len(asked)
        if prices.reads:
            unread = [session.num_unread(method) for session in asked]
            rows = sum(number if 0 < number <= LONG_REPORT else 1 for number in unread)
        seconds = prices.fixed_s + step_s(rows)
        if prices.one_forward:
            return seconds
        for depth in range(1, max(session.num_asked for session in asked)):
            seconds += step_s(sum(session.num_asked > depth for session in asked))
        return seconds

    def end_round(self, last_round: LastRound, num_open: int) -> None:
        members, self.members = self.members, []
        if members:
            self.lengths.observe(members, last_round, num_open)
