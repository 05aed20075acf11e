"""Two drafters for one session: the second is asked when the first takes unusually long, and the first answer wins.

To the session they are one drafter (gateway.interfaces.Drafter). Answers are never mixed: a proposal is all of one
drafter's. The winner is asked first from then on; the other is told what it has missed when it is asked again, and it
is not asked before it has given the answer that it still owes.

For exact mode only, where the draft cannot change the output. In rejection mode a token must be kept or dropped without
regard to its own value, and how long a drafter takes may depend on the tokens that it draws (a chain that ends early
comes early): of two answers the faster one would follow another law than the one that it was drawn from. And for
methods that draft from tokens alone: the target's hidden states are sent to one drafter.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from gateway.drafter_line import Lease
from gateway.metrics import GatewayMetrics
from shared.messages import DraftStep, ProposalReply, SessionSpec

# Answers that tell how long one usually takes, and how many there must be before they do.
_NUM_REMEMBERED = 200
_MIN_KNOWN = 16
_USUAL = 0.95


class AnswerTimes:
    """How long the drafters of one method take, over all sessions of a gateway. Answers that lose count too: without
    them what is usual would shrink with every hedge.
    """

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_NUM_REMEMBERED)

    def add(self, seconds: float) -> None:
        self._seconds.append(seconds)

    def usual_s(self) -> float | None:
        """The time within which 95 % of the answers came; None while too few are known."""
        if len(self._seconds) < _MIN_KNOWN:
            return None
        return sorted(self._seconds)[math.ceil(_USUAL * len(self._seconds)) - 1]


@dataclass
class _Side:
    """One of the two drafters; told_len: it knows the output up to here. None: it has not been opened."""

    lease: Lease
    told_len: int | None = None


class HedgedDrafter:
    """`lease` is what the session holds: the first drafter, and the other one once there is one."""

    def __init__(
        self, first: Lease, acquire_other: Callable[[str], Lease | None], times: AnswerTimes, metrics: GatewayMetrics
    ) -> None:
        """acquire_other: a place for the same method at another address than the given one."""
        self.lease = Lease(self, first.method, self._release, first.address)
        self._acquire_other = acquire_other
        self._times = times
        self._metrics = metrics
        self._leader = _Side(first)
        self._other: _Side | None = None
        self._owed: asyncio.Task[ProposalReply] | None = None  # by the other one
        self._committed: list[int] = []

    async def open(self, spec: SessionSpec) -> None:
        self._spec = spec
        self._committed = list(spec.committed_token_ids)
        self._leader.told_len = len(self._committed)
        await self._leader.lease.drafter.open(spec)

    async def propose(self, step: DraftStep) -> ProposalReply:
        """Raises DrafterLost when the one that is asked first is lost; the other one may come and go unnoticed."""
        self._take(step)
        first = asyncio.create_task(self._ask(self._leader, step))
        try:
            await asyncio.wait({first}, timeout=self._times.usual_s())
            other = None if first.done() else await self._find_other()
            if other is None:
                return await first
            self._metrics.draft_hedges.inc()
            second = self._owed = asyncio.create_task(self._ask(other, step))
            await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() or second.exception() is not None:
                return await first
        except asyncio.CancelledError:
            first.cancel()
            raise
        self._metrics.draft_hedges_won.inc()
        self._leader, self._other, self._owed = other, self._leader, first
        self.lease.address = other.lease.address
        return second.result()

    async def advance(self, step: DraftStep) -> None:
        self._take(step)
        await self._leader.lease.drafter.advance(self._step_of(self._leader, step))

    async def close(self) -> None:
        await self._end_other()
        await self._leader.lease.drafter.close()

    def _take(self, step: DraftStep) -> None:
        """What the step says of tokens that a drafter was told before, it has to be told again: they were a guess."""
        self._committed[step.base_len :] = step.committed_token_ids
        for side in (self._leader, self._other):
            if side is not None and side.told_len is not None:
                side.told_len = min(side.told_len, step.base_len)

    async def _ask(self, side: _Side, step: DraftStep) -> ProposalReply:
        drafter = side.lease.drafter
        if side.told_len is None:
            side.told_len = step.committed_len
            await drafter.open(dataclasses.replace(self._spec, committed_token_ids=tuple(self._committed)))
        started = time.perf_counter()
        reply = await drafter.propose(self._step_of(side, step))
        self._times.add(time.perf_counter() - started)
        return reply

    def _step_of(self, side: _Side, step: DraftStep) -> DraftStep:
        """The step as this one needs it: with all that it has not been told."""
        base_len, side.told_len = side.told_len or 0, step.committed_len
        missed = tuple(self._committed[base_len : step.committed_len])
        return dataclasses.replace(step, base_len=base_len, committed_token_ids=missed)

    async def _find_other(self) -> _Side | None:
        """The other one, if it can be asked. One that was lost is replaced."""
        if self._owed is not None:
            if not self._owed.done():
                return None
            if self._owed.exception() is not None and self._other is not None:
                self._other.lease.release()
                await self._end_other()
            self._owed = None
        if self._other is None:
            lease = self._acquire_other(self._leader.lease.address)
            self._other = _Side(lease) if lease is not None else None
        return self._other

    async def _end_other(self) -> None:
        other, self._other = self._other, None
        owed, self._owed = self._owed, None
        if owed is not None:
            owed.cancel()
            await asyncio.gather(owed, return_exceptions=True)
        if other is not None:
            await other.lease.drafter.close()

    def _release(self) -> None:
        self._leader.lease.release()
        if self._other is not None:
            self._other.lease.release()
