"""What can go wrong with the network of a NetnsFleet: delay, loss, and links that carry nothing for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.chaos.faults import Fault
from tests.chaos.netns_fleet import NetnsFleet

_ONE_WAY_DELAY_MS = 40.0
_LOSS_PERCENT = 3.0
_IMPAIRED_S = 4.0
_SHORT_CUT_S = 3.0
# Longer than gRPC's keepalive: the peer is given up, and another one is taken.
_LONG_CUT_S = 20.0


def network_faults(fleet: NetnsFleet) -> Sequence[Fault]:
    links = ("drafter-0", "verifier-0", "gateway-0", "redis", "client")
    return [
        *(_impaired(fleet, name, delay_ms=_ONE_WAY_DELAY_MS) for name in links),
        *(_impaired(fleet, name, loss_percent=_LOSS_PERCENT) for name in links),
        *(_cut(fleet, name, _SHORT_CUT_S) for name in links),
        *(_cut(fleet, name, _LONG_CUT_S) for name in ("drafter-0", "verifier-0", "gateway-0")),
    ]


def _impaired(fleet: NetnsFleet, name: str, *, delay_ms: float = 0.0, loss_percent: float = 0.0) -> Fault:
    async def strike() -> None:
        member = fleet.member(name)
        await asyncio.to_thread(fleet.network.impair, member, delay_ms=delay_ms, loss_percent=loss_percent)
        try:
            await asyncio.sleep(_IMPAIRED_S)
        finally:
            fleet.network.restore(member)

    what = f"{delay_ms:g} ms each way" if delay_ms else f"{loss_percent:g} % loss each way"
    return Fault(f"{what}, {name.partition('-')[0]}", strike)


def _cut(fleet: NetnsFleet, name: str, seconds: float) -> Fault:
    async def strike() -> None:
        fleet.network.cut(fleet.member(name))
        try:
            await asyncio.sleep(seconds)
        finally:
            fleet.network.join(fleet.member(name))

    return Fault(f"no network for {seconds:g} s, {name.partition('-')[0]}", strike)
