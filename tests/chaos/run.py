"""A storm over a load: references first, undisturbed and without speculation; then the same requests in the storm."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import redis.asyncio as aioredis

from tests.chaos.client import Received, fetch
from tests.chaos.fleet import Fleet
from tests.chaos.storm import Storm

PROMPTS = (
    "def add(a, b):\n    return a + b\n\n\ndef sub(",
    "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):",
    "for name in names:\n    print(name)\nfor name in",
    "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):",
)
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 0.8, "seed": 5},
    {"temperature": 1.1, "seed": 6, "top_p": 0.9, "frequency_penalty": 0.3},
)
METHODS = ("draft_model", "ngram", "auto", "off")
_DEADLINE_S = 600.0


@dataclass
class Report:
    num_requests: int = 0
    mismatches: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    num_reconnects: int = 0
    stalls_s: list[float] = field(default_factory=list)
    misfortunes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0
    leftovers: list[str] = field(default_factory=list)

    def stall_s(self, quantile: float) -> float:
        """Of the longest pause between two events of each request."""
        if len(self.stalls_s) < 2:
            return max(self.stalls_s, default=0.0)
        return statistics.quantiles(self.stalls_s, n=1000)[min(998, int(quantile * 1000) - 1)]


@dataclass(frozen=True)
class Load:
    num_requests: int
    num_at_once: int
    num_tokens: int
    mean_pause_s: float
    seed: int


async def run_chaos(fleet: Fleet, load: Load, progress: Callable[[int], None] = lambda _count: None) -> Report:
    """Raises what the fleet itself fails with; what requests fail with is in the report."""
    references = await _references(fleet, load)
    report = Report(num_requests=load.num_requests)
    storm = Storm(fleet, load.seed, mean_pause_s=load.mean_pause_s)
    raging = asyncio.create_task(storm.run())
    started = time.monotonic()
    room = asyncio.Semaphore(load.num_at_once)

    async def one(index: int) -> None:
        async with room:
            await _request(fleet, load, index, references, report)
            progress(1)

    try:
        await asyncio.gather(*(one(index) for index in range(load.num_requests)))
    finally:
        raging.cancel()
        await asyncio.gather(raging, return_exceptions=True)
        await storm.settle()
    report.seconds = time.monotonic() - started
    report.misfortunes = storm.counts
    report.leftovers = await _leftovers(fleet)
    return report


def _body(index: int, load: Load, method: str) -> dict[str, Any]:
    return {
        "prompt": PROMPTS[index % len(PROMPTS)],
        **PARAMS[index // len(PROMPTS) % len(PARAMS)],
        "max_tokens": load.num_tokens,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
        "speculation": {"method": method, "num_speculative_tokens": 1 + index % 5},
    }


async def _references(fleet: Fleet, load: Load) -> list[Received]:
    count = len(PROMPTS) * len(PARAMS)
    rng = random.Random(0)
    return await asyncio.gather(
        *(fetch(fleet.urls, f"reference-{index}", _body(index, load, "off"), rng, 300.0) for index in range(count))
    )


async def _request(fleet: Fleet, load: Load, index: int, references: list[Received], report: Report) -> None:
    rng = random.Random(load.seed * 1_000_003 + index)
    body = _body(index, load, METHODS[rng.randrange(len(METHODS))])
    if rng.random() < 0.5:
        body["speculation"]["token_tree"] = True
    expected = references[index % len(references)]
    try:
        received = await fetch(fleet.urls, f"chaos-{load.seed}-{index}", body, rng, _DEADLINE_S)
    except TimeoutError:
        report.failures.append(f"request {index}: no end within {_DEADLINE_S:g} s")
        return
    report.num_reconnects += received.num_reconnects
    report.stalls_s.append(max(received.stalls_s, default=0.0))
    if (received.token_ids, received.text, received.finish_reason) != (
        expected.token_ids,
        expected.text,
        expected.finish_reason,
    ):
        pairs = zip(expected.token_ids, received.token_ids, strict=False)
        place = next((index for index, (wanted, found) in enumerate(pairs) if wanted != found), -1)
        report.mismatches.append(
            f"request {index}: {len(received.token_ids)} of {len(expected.token_ids)} tokens, first difference at "
            f"{place}, finish {received.finish_reason}; {received.problems[-2:]}"
        )


async def _leftovers(fleet: Fleet) -> list[str]:
    """What is still held once everybody has gone: sessions, KV blocks, Redis keys that never expire."""
    found: list[str] = []
    for _ in range(100):
        found = await _held(fleet)
        if not found:
            return []
        await asyncio.sleep(0.2)
    return found


async def _held(fleet: Fleet) -> list[str]:
    found: list[str] = []
    for part in fleet.of_kind("verifier"):
        verifier = await fleet.verifier_info(part)
        if verifier.num_sessions or verifier.num_free_blocks != verifier.num_blocks:
            used = verifier.num_blocks - verifier.num_free_blocks
            found.append(f"{part.name}: {verifier.num_sessions} sessions, {used} KV blocks")
    for part in fleet.of_kind("drafter"):
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
