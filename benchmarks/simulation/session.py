"""One request in simulated time: the gateway's side of it, gateway/decoding/decode_loop.py and
gateway/proposals/drafting.py as events.

`auto` is decided at the verifier (verifier_auto.py): a session asks for what its last commit says. Not simulated:
hidden states, trees, lost services.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulation.costs import Costs
from benchmarks.simulation.drafter import SimulatedDrafter
from benchmarks.simulation.events import Events
from benchmarks.simulation.rounds import RoundTimes, SessionRound
from benchmarks.simulation.verifier import SimulatedSession, SimulatedVerifier
from benchmarks.simulation.verifier_auto import DRAFT_METHOD, DrafterLengths
from benchmarks.simulation.worlds.text import Text
from outrider.drafting.session import LONG_REPORT
from outrider.gateway.config import GatewayConfig
from outrider.gateway.proposals.remote_source import ALONE_RUN, LONGEST_ALONE_RUN

_DRAFT_TIMEOUT_S = GatewayConfig().draft_timeout_ms * 1e-3


@dataclass(frozen=True)
class Link:
    """The link between gateway and drafter. Each way takes half of the round trip, times 1 - jitter .. 1 + jitter."""

    rtt_s: float = 0.0
    jitter: float = 0.0

    def one_way_s(self, rng: random.Random) -> float:
        if not self.jitter:
            return 0.5 * self.rtt_s
        return 0.5 * self.rtt_s * rng.uniform(1.0 - self.jitter, 1.0 + self.jitter)


@dataclass(frozen=True)
class Request:
    """accepted: what was recorded of one request, round by round; the simulation draws from it, or, where there is a
    text, reads what is accepted from `text_start` on."""

    num_tokens: int
    num_prompt_rows: int
    accepted: tuple[int, ...] = ()
    text: Text | None = None
    text_start: int = 0


@dataclass
class Tally:
    """Totals of what all sessions have done."""

    num_tokens: int = 0
    num_rounds: int = 0
    num_drafted_rounds: int = 0
    num_draft_tokens: int = 0
    num_accepted: int = 0
    num_timeouts: int = 0
    first_token_s: list[float] = field(default_factory=list)
    # Per request: seconds after the first token, over the tokens after it.
    token_s: list[float] = field(default_factory=list)

    def reset(self) -> None:
        vars(self).update(vars(Tally()))


@dataclass(eq=False, slots=True)
class Session(SimulatedSession):
    """length: draft tokens of every round; 0: none; None: `auto`."""

    events: Events
    costs: Costs
    link: Link
    rng: random.Random
    request: Request
    length: int | None
    verifier: SimulatedVerifier
    acquire: Callable[[], SimulatedDrafter | None]
    release: Callable[[SimulatedDrafter], None]
    on_end: Callable[[], None]
    tally: Tally
    # Of `auto`: the draft that the verifier wants next, and how long it is worth waiting for.
    method: str = DRAFT_METHOD
    num_wanted: int = 0
    patience_s: float = _DRAFT_TIMEOUT_S
    _num_committed: int = 0
    _drafter: SimulatedDrafter | None = None
    # When the last message to the drafter arrives there: later ones do not overtake it.
    _sent_until: float = 0.0
    _is_late: bool = False
    _num_timeouts: int = 0
    _ask: int = 0
    # Whether the drafter had much to read before it drafted for this round.
    is_catch_up: bool = False
    drafter_s: float = 0.0
    _first_token_at: float = 0.0

    def start(self) -> None:
        """The request is at the gateway now."""
        self.opened_at = self.events.now
        self.num_pending = self.num_behind = self.request.num_prompt_rows
        self.verifier.open(self)
        self.events.after(0.5 * self.costs.request_s, self._round)

    # ---- gateway ----

    def _round(self) -> None:
        self.num_asked = self.num_draft_tokens = 0
        num_wanted = self.num_wanted if self.length is None else self.length
        if self._is_late:
            self._verify(self._alone_run())
        elif num_wanted == 0:
            self._verify(self.request.num_tokens)
        elif not self._open():
            self._verify(self._alone_run())
        elif self._num_committed == 0:
            self._verify(1)
        else:
            self._ask_drafter(num_wanted)

    def _alone_run(self) -> int:
        return min(ALONE_RUN << max(0, self._num_timeouts - 1), LONGEST_ALONE_RUN)

    def _open(self) -> bool:
        if self._drafter is None:
            self._drafter = self.acquire()
            if self._drafter is None:
                return False
            self.num_behind = self.request.num_prompt_rows + self._num_committed
            self._tell(self._drafter.open)
        return True

    def _tell(self, action: Callable[[Session], None]) -> None:
        now = self.events.now
        arrives_at = now + 0.5 * self.costs.drafter_trip_s + self.link.one_way_s(self.rng)
        self._sent_until = max(self._sent_until, arrives_at)
        self.events.after(self._sent_until - now, action, self)

    def _ask_drafter(self, num_wanted: int) -> None:
        self.num_asked = num_wanted
        self._ask += 1
        self.is_catch_up = self.num_behind > LONG_REPORT
        if self._drafter is not None:
            self._tell(self._drafter.submit)
        patience_s = min(_DRAFT_TIMEOUT_S, self.patience_s) if self.length is None else _DRAFT_TIMEOUT_S
        self.events.after(patience_s, self._timeout, self._ask)

    def _timeout(self, ask: int) -> None:
        if ask != self._ask or self._is_late:
            return
        self.tally.num_timeouts += 1
        self._is_late = True
        self._num_timeouts += 1
        self._verify(self._alone_run())

    def _answer(self, ask: int, total_s: float) -> None:
        if ask != self._ask:
            return
        if self._is_late:
            self._is_late = False
            return
        self._num_timeouts, self.drafter_s = 0, total_s
        # What cannot be committed any more is not verified (the scheduler cuts it).
        self.num_draft_tokens = max(0, min(self.num_asked, self.request.num_tokens - self._num_committed - 1))
        self._ask += 1  # the timeout of this ask means nothing any more
        self._verify(0)

    def _verify(self, free_run: int) -> None:
        self.free_run_left = free_run
        self.events.after(0.5 * self.costs.verifier_trip_s, self.verifier.submit, self)

    def _observe(self, member: SessionRound) -> None:
        """A commit is at the gateway."""
        now, tally = self.events.now, self.tally
        num_tokens, num_proposed = member.num_committed, member.num_proposed
        tally.num_tokens += num_tokens
        tally.num_rounds += 1
        if num_proposed:
            tally.num_drafted_rounds += 1
            tally.num_draft_tokens += num_proposed
            tally.num_accepted += num_tokens - 1
        # A draft's tokens are in the drafter's cache, but for the last one.
        self.num_behind += num_tokens if not num_proposed else 1 + (num_tokens > num_proposed)
        if not self._first_token_at:
            self._first_token_at = now + 0.5 * self.costs.request_s
            tally.first_token_s.append(self._first_token_at - self.opened_at)
        if not member.more:
            if self._num_committed >= self.request.num_tokens:
                self._end()
            else:
                self._round()

    def _end(self) -> None:
        ended_at = self.events.now + 0.5 * self.costs.request_s
        self.tally.token_s.append((ended_at - self._first_token_at) / max(1, self.request.num_tokens - 1))
        if self._drafter is not None:
            self.release(self._drafter)
            self._tell(self._drafter.close)
        self.events.after(0.5 * self.costs.request_s, self.on_end)

    # ---- what the services call ----

    @property
    def runs_to_end(self) -> bool:
        """Returns whether its free run lasts to the end of the output, unless the verifier ends it."""
        return self.free_run_left > 0 and self.free_run_left >= self.request.num_tokens - self._num_committed

    def num_unread(self, _method: str) -> int:
        return self.num_behind

    @property
    def max_tokens(self) -> int:
        return self.request.num_tokens

    @property
    def num_wanted_rows(self) -> int:
        return self.num_pending + self.num_draft_tokens

    def accept(self) -> int:
        num_accepted = 0
        if self.num_draft_tokens and self.request.text is not None:
            position = self.request.text_start + self._num_committed
            num_accepted = self.request.text.accepted(position, self.num_draft_tokens, self.events.now)
        elif self.num_draft_tokens:
            num_accepted = min(self.num_draft_tokens, self.rng.choice(self.request.accepted))
        self._num_committed += num_accepted + 1
        return num_accepted + 1

    def is_finished(self) -> bool:
        return self._num_committed >= self.request.num_tokens

    def committed(self, num_tokens: int, times: RoundTimes, *, more: bool) -> None:
        num_proposed, self.num_draft_tokens = self.num_draft_tokens, 0
        base_len = self._num_committed - num_tokens
        num_asked, self.num_asked = self.num_asked, 0
        member = SessionRound(
            self, times, base_len, num_asked, num_proposed, num_tokens, more, DRAFT_METHOD if num_asked else ""
        )
        if isinstance(self.verifier.own_drafts, DrafterLengths):
            self.verifier.own_drafts.committed(self, member)
        self.events.after(0.5 * self.costs.verifier_trip_s, self._observe, member)

    def proposed(self, total_s: float) -> None:
        delay_s = 0.5 * self.costs.drafter_trip_s + self.link.one_way_s(self.rng)
        self.events.after(delay_s, self._answer, self._ask, total_s)
