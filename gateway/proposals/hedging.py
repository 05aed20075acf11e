"""Hedged requests: a second drafter is asked when the first takes unusually long, and the first answer wins.

To the session the two are one drafter (gateway.request.interfaces.Drafter). A proposal comes from one of them entirely.
The winner is asked first from then on. The other is sent the tokens it missed when it is asked again, and not before
its outstanding answer has come.

For exact mode only, where the draft cannot change the output. In rejection mode a token must be kept or dropped
independently of its value, but a drafter's time may depend on the tokens that it draws (a chain that ends early comes
early), so the faster of two answers would follow another law. For methods that draft from tokens alone, as hidden
states are sent to one drafter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.proposals.drafter_connection import Lease
from outrider.shared.messages import DraftStep, ProposalReply, SessionSpec

# answers; window of the quantile; 47067eb
_WINDOW = 200
# answers; fewest for a quantile; 47067eb
_MIN_SAMPLES = 16
# quantile; an answer beyond it is hedged; chosen: 5 % more requests at most (Dean and Barroso 2013, The Tail at Scale)
_QUANTILE = 0.95


class AnswerTimes:
    """Answer times of one method's drafters, over all sessions of a gateway. Losing answers count too: without them the
    quantile would shrink with every hedge.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_WINDOW)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def usual_s(self) -> float | None:
        """The time within which _QUANTILE of the answers came; None before _MIN_SAMPLES."""
        if len(self._seconds) < _MIN_SAMPLES:
            return None
        return sorted(self._seconds)[math.ceil(_QUANTILE * len(self._seconds)) - 1]


@dataclass
class _Side:
    """One of the two drafters. sent_len: output length that it has been sent; None: not opened yet."""

    lease: Lease
    sent_len: int | None = None


class HedgedDrafter:
    """lease: what the session holds; it covers both drafters."""

    def __init__(
        self, first: Lease, acquire_other: Callable[[str], Lease | None], times: AnswerTimes, metrics: GatewayMetrics
    ) -> None:
        """acquire_other(address): a lease for the same method at another address; None: no drafter has room."""
        self.lease = Lease(self, first.method, self._release, first.address)
        self._acquire_other = acquire_other
        self._times = times
        self._metrics = metrics
        self._leader = _Side(first)
        self._other: _Side | None = None
        self._outstanding: asyncio.Task[ProposalReply] | None = None  # by the other drafter
        self._committed: list[int] = []

    async def open(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._committed = list(spec.committed_token_ids)
        self._leader.sent_len = len(self._committed)
        await self._leader.lease.drafter.open(spec)

    async def propose(self, step: DraftStep) -> ProposalReply:
        """Raises DrafterLost when the leader is lost; losing the other drafter has no effect."""
        self._take(step)
        first = asyncio.create_task(self._ask(self._leader, step))
        try:
            await asyncio.wait({first}, timeout=self._times.usual_s())
            other = None if first.done() else await self._find_other()
            if other is None:
                return await first
            self._metrics.draft_hedges.inc()
            second = self._outstanding = asyncio.create_task(self._ask(other, step))
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() or second.exception() is not None:
                return await first
        except asyncio.CancelledError:
            first.cancel()
            raise
        self._metrics.draft_hedges_won.inc()
        self._leader, self._other, self._outstanding = other, self._leader, first
        self.lease.address = other.lease.address
        return second.result()

    async def advance(self, step: DraftStep) -> None:
        self._take(step)
        await self._leader.lease.drafter.advance(self._step_of(self._leader, step))

    async def close(self) -> None:
        await self._end_other()
        await self._leader.lease.drafter.close()

    def _take(self, step: DraftStep) -> None:
        """Takes the step's tokens over. Tokens sent before from base_len on were a guess and must be sent again."""
        self._committed[step.base_len :] = step.committed_token_ids
        for side in (self._leader, self._other):
            if side is not None and side.sent_len is not None:
                side.sent_len = min(side.sent_len, step.base_len)

    async def _ask(self, side: _Side, step: DraftStep) -> ProposalReply:
        drafter = side.lease.drafter
        if side.sent_len is None:
            side.sent_len = step.committed_len
            await drafter.open(dataclasses.replace(self._spec, committed_token_ids=tuple(self._committed)))
        started = time.perf_counter()
        reply = await drafter.propose(self._step_of(side, step))
        self._times.add(time.perf_counter() - started)
        return reply

    def _step_of(self, side: _Side, step: DraftStep) -> DraftStep:
        """The step with all tokens that this drafter has not been sent."""
        base_len, side.sent_len = side.sent_len or 0, step.committed_len
        missed = tuple(self._committed[base_len : step.committed_len])
        return dataclasses.replace(step, base_len=base_len, committed_token_ids=missed)

    async def _find_other(self) -> _Side | None:
        """The other drafter, if it can be asked; replaced if it was lost."""
        if self._outstanding is not None:
            if not self._outstanding.done():
                return None
            if self._outstanding.exception() is not None and self._other is not None:
                self._other.lease.release()
                await self._end_other()
            self._outstanding = None
        if self._other is None:
            lease = self._acquire_other(self._leader.lease.address)
            self._other = _Side(lease) if lease is not None else None
        return self._other

    async def _end_other(self) -> None:
        other, self._other = self._other, None
        outstanding, self._outstanding = self._outstanding, None
        if outstanding is not None:
            outstanding.cancel()
            await asyncio.gather(outstanding, return_exceptions=True)
        if other is not None:
            await other.lease.drafter.close()

    def _release(self) -> None:
        self._leader.lease.release()
        if self._other is not None:
            self._other.lease.release()
