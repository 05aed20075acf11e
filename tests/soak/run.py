"""The load, with samples beside it; now and then it stands still, and then nothing may be held."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx
import redis.asyncio as aioredis

from tests.chaos.run import leftovers
from tests.soak.fleet import SoakFleet
from tests.soak.load import SoakLoad, Tally
from tests.soak.samples import Samples
from tests.soak.verdict import Limits, Trend, Window, latency_ratio, trends, windows

_NUM_WINDOWS = 10
# Seconds after its time to live in which Redis may still hold a key: it looks for them ten times a second.
_EXPIRY_S = 5.0


@dataclass(frozen=True)
class Plan:
    """idle_s: of load between two stops. warm_up_s: latencies of the time before are not judged. deadline_s: a request
    that takes longer hangs.
    """

    seconds: float
    num_clients: int
    sample_s: float
    idle_s: float
    warm_up_s: float
    deadline_s: float = 120.0
    seed: int = 0
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True)
class SoakReport:
    """latency_ratio: p99 of the last third over that of the first. held: what was not free when nothing ran."""

    seconds: float
    tally: Tally
    trends: list[Trend]
    windows: list[Window]
    latency_ratio: float
    num_stops: int
    held: list[str]
    limits: Limits

    def violations(self) -> list[str]:
        limit = self.limits.latency_ratio
        is_slower = math.isfinite(limit) and not self.latency_ratio <= limit  # it may be no number
        return [
            *(f"FAILED {line}" for line in self.tally.failures),
            *(f"HELD {line}" for line in self.held),
            *(
                f"GROWS {trend.process}, {trend.what}: {trend.per_min:+.2f} a minute"
                for trend in self.trends
                if not trend.is_flat
            ),
            *([f"SLOWER p99 x {self.latency_ratio:.2f}"] if is_slower else []),
        ]


async def run_soak(
    fleet: SoakFleet, plan: Plan, progress: Callable[[float, Tally], None] = lambda _seconds, _tally: None
) -> SoakReport:
    """Raises OSError when a process of the fleet is gone. progress: after every sample."""
    await _wait_ready(fleet)
    samples = Samples()
    held: list[str] = []
    num_stops = 0
    end_s = samples.started_s + plan.seconds
    load = SoakLoad(
        fleet.urls[0],
        fleet.grpc_address,
        num_clients=plan.num_clients,
        deadline_s=plan.deadline_s,
        seed=plan.seed,
        started_s=samples.started_s,
    )
    async with load:
        while time.monotonic() < end_s:
            load.go_on()
            stop_s = min(end_s, time.monotonic() + plan.idle_s)
            while (left_s := stop_s - time.monotonic()) > 0:
                await asyncio.sleep(min(plan.sample_s, left_s))
                await samples.take(fleet)
                progress(time.monotonic() - samples.started_s, load.tally)
            await load.pause()
            held += [f"after {time.monotonic() - samples.started_s:.0f} s: {line}" for line in await leftovers(fleet)]
            num_stops += 1
        ended_s = time.monotonic() - samples.started_s
    held += await _keys_beyond_their_time(fleet)
    return SoakReport(
        seconds=ended_s,
        tally=load.tally,
        trends=trends(samples.series, plan.limits),
        windows=windows(load.tally.answers, plan.warm_up_s, ended_s, _NUM_WINDOWS),
        latency_ratio=latency_ratio(load.tally.answers, plan.warm_up_s, ended_s),
        num_stops=num_stops,
        held=held,
        limits=plan.limits,
    )


async def _wait_ready(fleet: SoakFleet) -> None:
    """The gateway knows its verifier and every drafter."""
    async with asyncio.timeout(60.0), httpx.AsyncClient(base_url=fleet.urls[0], timeout=60.0) as http:
        num_drafters = len(fleet.of_kind("drafter"))
        known = re.compile(rf'^outrider:fleet_members\{{.*service="drafter"\}} {num_drafters:.1f}$', re.MULTILINE)
        ready = False
        while not ready:
            await asyncio.sleep(0.1)
            ready = (await http.get("/ready")).is_success and bool(known.search((await http.get("/metrics")).text))


async def _keys_beyond_their_time(fleet: SoakFleet) -> list[str]:
    await asyncio.sleep(fleet.session_ttl_s + _EXPIRY_S)
    client = aioredis.Redis.from_url(fleet.redis.url)
    try:
        # The gateways' own probe is always there: they write it every second.
        return [f"Redis: {key!r}" async for key in client.scan_iter() if not key.endswith(b":write-check")]
    finally:
        await client.aclose()
