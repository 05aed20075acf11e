"""One kind of trouble at a time: the same load under each, and how long streams stood still in it.

A storm (storm.py) says that nothing breaks; this says what each thing costs. Not here: what can go wrong where (the
lists of faults: process_faults.py, network_faults.py, compose.py).
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.chaos.client import Received
from tests.chaos.load import Load, Report, compared_request, fetch_references


@dataclass(frozen=True)
class Fault:
    """`strike` does it, waits, mends it, and returns when all is well again."""

    name: str
    strike: Callable[[], Awaitable[None]]


@dataclass
class FaultReport:
    """mend_s: of each strike, from its beginning until everything was well again."""

    name: str
    report: Report
    mend_s: list[float]


NO_FAULT = "none"


async def run_faults(
    urls: Sequence[str],
    faults: Sequence[Fault],
    load: Load,
    only: str = "",
    progress: Callable[[int], None] = lambda _count: None,
) -> list[FaultReport]:
    """First a round without any, then one with each that has `only` in its name.

    A round ends when `load.num_requests` have been answered and one strike at least is over. `load.mean_pause_s`: the
    least from a mended strike to the next.
    """
    references = await fetch_references(urls, load)
    indices = itertools.count()
    rounds = [Fault(NO_FAULT, _nothing), *(fault for fault in faults if only in fault.name)]
    return [await _round(urls, fault, load, references, indices, progress) for fault in rounds]


async def _nothing() -> None:
    await asyncio.sleep(1.0)


async def _round(
    urls: Sequence[str],
    fault: Fault,
    load: Load,
    references: Sequence[Received],
    indices: Iterator[int],
    progress: Callable[[int], None],
) -> FaultReport:
    found = FaultReport(fault.name, Report(), [])
    begun = 0

    async def requests() -> None:
        nonlocal begun
        while begun < load.num_requests or not found.mend_s:
            begun += 1
            await compared_request(urls, load, next(indices), references, found.report)
            found.report.num_requests += 1
            progress(1)

    async def strikes() -> None:
        rest_s = load.mean_pause_s
        while begun < load.num_requests or not found.mend_s:
            await asyncio.sleep(rest_s)
            started = time.monotonic()
            await fault.strike()
            found.mend_s.append(time.monotonic() - started)
            # TCP that has waited so long waits about as long again before it tries: streams must come to run between
            # two strikes, or what is measured is the sum of them (35 cuts of Redis with 0.5 s between: p50 of 23 s).
            rest_s = max(load.mean_pause_s, 3 * found.mend_s[-1])

    async with asyncio.TaskGroup() as group:
        group.create_task(strikes())
        for _ in range(load.num_at_once):
            group.create_task(requests())
    return found
