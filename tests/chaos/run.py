"""A storm over a load: references first, undisturbed and without speculation; then the same requests in the storm."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import redis.asyncio as aioredis

from tests.chaos.fleet import Fleet
from tests.chaos.load import Load, Report, compared_request, fetch_references
from tests.chaos.storm import Storm


async def run_chaos(fleet: Fleet, load: Load, progress: Callable[[int], None] = lambda _count: None) -> Report:
    """Raises what the fleet itself fails with; what requests fail with is in the report."""
    references = await fetch_references(fleet.urls, load)
    report = Report()
    storm = Storm(fleet, load.seed, mean_pause_s=load.mean_pause_s)
    raging = asyncio.create_task(storm.run())
    started = time.monotonic()

    async def client() -> None:
        """A fast machine is through with the requests before everything has happened: then there are more of them."""
        while report.num_requests < load.num_requests or storm.due:
            index = report.num_requests
            report.num_requests += 1
            await compared_request(fleet.urls, load, index, references, report)
            progress(1)

    try:
        await asyncio.gather(*(client() for _ in range(load.num_at_once)))
    finally:
        raging.cancel()
        await asyncio.gather(raging, return_exceptions=True)
        await storm.settle()
    report.seconds = time.monotonic() - started
    report.misfortunes = storm.counts
    report.leftovers = await leftovers(fleet)
    return report


async def leftovers(fleet: Fleet) -> list[str]:
    """What is still held once all are gone: sessions, KV blocks, recurrent states, Redis keys that never expire."""
    found: list[str] = []
    for _ in range(300):
        found = await _held(fleet)
        if not found:
            return []
        await asyncio.sleep(0.2)
    return found


async def _held(fleet: Fleet) -> list[str]:
    found: list[str] = []
    for part in fleet.of_kind("verifier"):
        verifier = await fleet.verifier_info(part)
        num_blocks = verifier.num_blocks - verifier.num_free_blocks
        num_states = verifier.num_state_slots - verifier.num_free_state_slots
        if verifier.num_sessions or num_blocks or num_states:
            held = f"{verifier.num_sessions} sessions, {num_blocks} KV blocks, {num_states} recurrent states"
            found.append(f"{part.name}: {held}")
    for part in [part for part in fleet.of_kind("drafter") if part.process is not None]:
        drafter = await fleet.drafter_info(part)
        if drafter.num_sessions:
            found.append(f"{part.name}: {drafter.num_sessions} sessions")
    client = aioredis.Redis.from_url(fleet.redis.url)
    try:
        async for key in client.scan_iter():
            if await client.ttl(key) == -1:
                found.append(f"Redis: {key!r} never expires")
    finally:
        await client.aclose()
    return found
