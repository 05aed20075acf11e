"""What the processes of a fleet hold at a moment: memory, descriptors, threads, keys, metric series.

Not here: whether that is too much (verdict.py).
"""

from __future__ import annotations

import os
import re
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import redis.asyncio as aioredis

from tests.soak.fleet import SoakFleet

MEMORY = "memory, MB"
DESCRIPTORS = "descriptors"
THREADS = "threads"
METRIC_SERIES = "metric series"
KEYS = "keys"
_MIB = 1 << 20


@dataclass(frozen=True)
class Point:
    at_s: float
    value: float


@dataclass
class Samples:
    """Series by process and by what was measured. at_s counts from `started_s`, on the monotonic clock."""

    started_s: float = field(default_factory=time.monotonic)
    series: defaultdict[tuple[str, str], list[Point]] = field(default_factory=lambda: defaultdict(list))

    def note(self, process: str, values: Mapping[str, float]) -> None:
        now = time.monotonic() - self.started_s
        for what, value in values.items():
            self.series[process, what].append(Point(now, value))

    async def take(self, fleet: SoakFleet) -> None:
        """Of every process now. Raises OSError when one is gone."""
        for part in fleet.parts.values():
            if part.process is not None:
                self.note(part.name, of_process(part.process.pid))
        async with httpx.AsyncClient(timeout=60.0) as http:
            metrics = (await http.get(f"{fleet.urls[0]}/metrics")).text
        self.note("gateway-0", {METRIC_SERIES: sum(not line.startswith("#") for line in metrics.splitlines())})
        client = aioredis.Redis.from_url(fleet.redis.url)
        try:
            told = await client.info("memory")
            self.note("redis", {MEMORY: told["used_memory"] / _MIB, KEYS: await client.dbsize()})
        finally:
            await client.aclose()


def of_process(pid: int) -> dict[str, float]:
    """Memory is what the process has allocated and uses: anonymous pages, not those of files, which others may share.

    Raises OSError when the process is gone.
    """
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    status = Path(f"/proc/{pid}/status").read_text()
    return {
        MEMORY: _kib("Anonymous", rollup) / 1024,
        DESCRIPTORS: len(os.listdir(f"/proc/{pid}/fd")),
        THREADS: _kib("Threads", status),
    }


def _kib(name: str, text: str) -> int:
    found = re.search(rf"^{name}:\s+(\d+)", text, re.MULTILINE)
    if found is None:  # a process that has ended and that nobody has waited for
        raise OSError(f"the process has no {name} any more")
    return int(found[1])
