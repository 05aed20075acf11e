"""What can happen to the processes of a Fleet, one at a time; of verifiers and gateways one is always left."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.chaos.faults import Fault
from tests.chaos.fleet import Fleet, Part

_PAUSE_S = 3.0


def process_faults(fleet: Fleet) -> Sequence[Fault]:
    firsts = [fleet.of_kind(kind)[0] for kind in ("drafter", "verifier", "gateway")]
    return [
        *(_killed(fleet, part) for part in firsts),
        *(_paused(part) for part in firsts),
        Fault("killed, Redis", lambda: _kill_redis(fleet)),
        Fault(f"paused {_PAUSE_S:g} s, Redis", lambda: _pause_redis(fleet)),
    ]


def _killed(fleet: Fleet, part: Part) -> Fault:
    async def strike() -> None:
        part.kill()
        part.start()
        await fleet.wait_serving(part)

    return Fault(f"killed, {part.kind}", strike)


def _paused(part: Part) -> Fault:
    async def strike() -> None:
        part.pause()
        await asyncio.sleep(_PAUSE_S)
        part.go_on()

    return Fault(f"paused {_PAUSE_S:g} s, {part.kind}", strike)


async def _kill_redis(fleet: Fleet) -> None:
    fleet.redis.kill()
    await asyncio.to_thread(fleet.redis.start)


async def _pause_redis(fleet: Fleet) -> None:
    fleet.redis.freeze()
    await asyncio.sleep(_PAUSE_S)
    fleet.redis.thaw()
