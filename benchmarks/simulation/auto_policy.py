"""`auto` in simulated time: the only module of the simulation that knows who decides the draft length, and from what.

Today that is the gateway: one AutoDrafting for each of its verifiers, one AdaptiveDraft per session, told of every
commit as gateway/proposals/drafting.py does, and steering runs in progress. When the verifier decides,
`auto_lengths` returns one of its own objects per verifier, `decide` and `observe` call it, and the rest goes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.simulation.events import Events
from benchmarks.simulation.rounds import Drafted, DraftLengths, SessionRound
from outrider.gateway.draft_length.adaptive_draft import AdaptiveDraft, AutoDrafting
from outrider.gateway.draft_length.by_verifier import ByVerifier
from outrider.gateway.draft_length.draft_policy import DraftPolicy, RoundOutcome
from outrider.gateway.proposals.drafter_connection import CATCH_UP_TOKENS
from outrider.gateway.proposals.drafting import DECISION_TOKENS
from outrider.verifier_service.round import _SAME_PRICE, _SAME_PRICE_US
from outrider.verifier_service.timing.gathering import LastRound

# The one that its costs were recorded of.
DRAFT_METHOD = "draft_model"


def auto_lengths(events: Events, trips_s: Sequence[float], limits: Sequence[Mapping[str, int]]) -> list[DraftLengths]:
    """For verifiers behind one gateway that draft by themselves; trips_s: to each of them and back. limits: the methods
    of each, with the most tokens that they draft.
    """
    names = [f"verifier-{place}" for place in range(len(trips_s))]
    by_verifier = ByVerifier(AutoDrafting, lambda: names)
    return [
        _GatewayLengths(events, trip_s, served, by_verifier.of(name))
        for name, trip_s, served in zip(names, trips_s, limits, strict=True)
    ]


class GatewayAuto:
    """For sessions of one gateway that ask drafters (session.py)."""

    def __init__(self) -> None:
        self._shared = AutoDrafting()

    def session(self, max_draft_tokens: int) -> DraftPolicy:
        return AdaptiveDraft(self._shared, max_draft_tokens, lambda: {DRAFT_METHOD: 0})


@dataclass(frozen=True, slots=True)
class RemoteDraft:
    """What a session asked a drafter for in a round, if it did (num_wanted above 0).

    draft_s: the drafter's own time; overhead_s: the round's beyond both services' work. is_catch_up: the drafter first
    had much to read.
    """

    num_wanted: int
    draft_s: float
    overhead_s: float
    is_catch_up: bool


def remote_outcome(member: SessionRound, draft: RemoteDraft) -> RoundOutcome:
    """Drafting._outcome of a session that asks a drafter."""
    times = member.times
    room = max(0, member.session.max_tokens - member.base_len - 1)
    num_asked = min(draft.num_wanted, room)
    return RoundOutcome(
        num_asked=num_asked,
        num_draft_tokens=member.num_proposed,
        num_accepted=member.num_committed - 1 if member.num_proposed else 0,
        batch_sessions=times.batch_sessions,
        draft_rows_s=tuple(1e-6 * rows_us for rows_us in times.draft_rows_us),
        tokens_per_s=times.tokens_per_s,
        draft_s=draft.draft_s * num_asked / max(1, draft.num_wanted),
        overhead_s=draft.overhead_s,
        method=DRAFT_METHOD if draft.num_wanted else "",
        round_tokens=times.last_round.num_tokens,
        round_s=times.last_round.seconds,
        open_sessions=times.open_sessions,
        is_catch_up=draft.is_catch_up,
        num_beyond_end=max(0, draft.num_wanted - num_asked) if num_asked == room else 0,
        verify_s=member.total_s if member.base_len else 0.0,
    )


@dataclass(eq=False, slots=True)
class _Run:
    """What the gateway knows of a session in its run: the fields of gateway.proposals.drafting.Drafting of note.

    read_len: output that a method had read at its last draft; missing: it has drafted nothing yet.
    """

    draft: AdaptiveDraft
    num_steered: tuple[str, int]
    until_decision: int = 1
    num_wanted: int = 0
    read_len: dict[str, int] = field(default_factory=dict)
    compared_us: tuple[int, ...] = ()
    told_us: tuple[int, ...] = ()
    draft_rows_s: tuple[float, ...] = ()


class _GatewayLengths:
    """Of one verifier; commits take half of the trip to the gateway, and what it says half of it back."""

    def __init__(self, events: Events, trip_s: float, limits: Mapping[str, int], shared: AutoDrafting) -> None:
        self._events = events
        self._one_way_s = 0.5 * trip_s
        self._limits = limits
        self._shared = shared
        self._runs: dict[int, _Run] = {}

    def opened(self, session: Drafted) -> None:
        draft = AdaptiveDraft(self._shared, max(self._limits.values()), lambda: self._limits)
        num_wanted = draft.num_draft_tokens(before_prefill=True)
        self._runs[id(session)] = _Run(draft, (draft.method, num_wanted), num_wanted=num_wanted)
        session.method, session.num_wanted = draft.method, num_wanted

    def decide(self, sessions: Iterable[Drafted]) -> None:
        """The gateway decides when a commit has come to it."""

    def observe(self, members: Sequence[SessionRound], last_round: LastRound, num_open: int) -> None:
        self._events.after(self._one_way_s, self._at_gateway, members)

    def _at_gateway(self, members: Sequence[SessionRound]) -> None:
        """Drafting.observe and Drafting.steering, commit by commit."""
        steered = []
        for member in members:
            run = self._runs[id(member.session)]
            run.until_decision -= member.num_committed
            run.draft.observe(self._outcome(run, member))
            if not member.more:
                del self._runs[id(member.session)]
            elif run.until_decision <= 0:
                num_wanted = run.draft.num_draft_tokens()
                run.until_decision = min(run.draft.free_run(), DECISION_TOKENS)
                if (run.draft.method, num_wanted) != run.num_steered:
                    run.num_steered = run.draft.method, num_wanted
                    steered.append((member.session, *run.num_steered))
        if steered:
            self._events.after(self._one_way_s, _steer, steered)

    def _outcome(self, run: _Run, member: SessionRound) -> RoundOutcome:
        """Drafting._take_local and Drafting._outcome."""
        times, is_prefill = member.times, member.base_len == 0
        is_catch_up = False
        draft_s, num_asked = 0.0, member.num_asked
        if num_asked:
            run.num_wanted, draft_s = num_asked, times.draft_s
            read_len = run.read_len.get(member.method, -CATCH_UP_TOKENS - 1)
            is_catch_up = member.base_len - read_len > CATCH_UP_TOKENS
            run.read_len[member.method] = member.base_len + member.num_committed
        room = max(0, member.session.max_tokens - member.base_len - 1)
        num_wanted = run.num_steered[1] or run.num_wanted
        return RoundOutcome(
            num_asked=num_asked,
            num_draft_tokens=member.num_proposed,
            num_accepted=member.num_committed - 1 if member.num_proposed else 0,
            batch_sessions=times.batch_sessions,
            draft_rows_s=_prices_s(run, times.draft_rows_us),
            tokens_per_s=times.tokens_per_s,
            method=member.method if num_asked else "",
            round_tokens=times.last_round.num_tokens,
            round_s=times.last_round.seconds,
            open_sessions=times.open_sessions,
            is_catch_up=is_catch_up,
            draft_depth=times.draft_depth if num_asked else 0,
            num_beyond_end=max(0, num_wanted - num_asked) if num_asked == room else 0,
            draft_s=draft_s,
            overhead_s=0.0,
            verify_s=0.0 if is_prefill else member.total_s - draft_s,
        )


def _prices_s(run: _Run, draft_rows_us: tuple[int, ...]) -> tuple[float, ...]:
    """What the gateway was sent last: prices come when they have changed (verifier_service.round)."""
    if draft_rows_us is not run.compared_us:
        run.compared_us = draft_rows_us
        pairs = itertools.zip_longest(run.told_us, draft_rows_us, fillvalue=0)
        if any(abs(rows_us - told_us) > max(_SAME_PRICE_US, _SAME_PRICE * told_us) for told_us, rows_us in pairs):
            run.told_us, run.draft_rows_s = draft_rows_us, tuple(1e-6 * rows_us for rows_us in draft_rows_us)
    return run.draft_rows_s


def _steer(steered: Sequence[tuple[Drafted, str, int]]) -> None:
    for session, method, num_wanted in steered:
        session.method, session.num_wanted = method, num_wanted
