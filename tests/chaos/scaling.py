"""Drafters come and go under load, as whoever scales does it: started, and ended with SIGTERM.

Every stream must be whole: no lost connection, no error, the bytes of the undisturbed run.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc.aio

from tests.chaos.client import Received
from tests.chaos.fleet import Fleet
from tests.chaos.load import Load, Report, compared_request, fetch_references
from tests.chaos.run import leftovers

SCHEDULE = (1, 3, 0, 2)
_LOOK_EVERY_S = 0.1
# A gateway looks for its drafters once a second; a fast machine is through with a phase's requests before that.
_LEAST_PHASE_S = 3.0
# A busy one takes longer until a new drafter is found and asked.
_LONGEST_LOOK_S = 60.0


@dataclass
class Phase:
    """The time from which `num_drafters` serve to the next change; `report` has the requests that began in it.

    most_draft_sessions: at all drafters together, the most that was seen at a time.
    """

    num_drafters: int
    report: Report = field(default_factory=Report)
    most_draft_sessions: int = 0


async def run_scaling(
    fleet: Fleet,
    load: Load,
    schedule: Sequence[int] = SCHEDULE,
    progress: Callable[[int], None] = lambda _count: None,
) -> tuple[list[Phase], list[str]]:
    """The phases, `load.num_requests` in each at least, and what is still held at the end."""
    references = await fetch_references(fleet.urls, load)
    phases = [Phase(num_drafters) for num_drafters in schedule]
    await _scale_to(fleet, schedule[0])
    under_load = _Load(fleet, load, references, progress)
    async with asyncio.TaskGroup() as group:
        for place, phase in enumerate(phases):
            under_load.report = phase.report
            if place == 0:
                for _ in range(load.num_at_once):
                    group.create_task(under_load.run())
            await _scale_to(fleet, phase.num_drafters)
            began = time.monotonic()
            num_before = phase.report.num_requests  # those that began while the drafters came or went
            while (
                phase.report.num_requests < num_before + load.num_requests
                or time.monotonic() < began + _LEAST_PHASE_S
                or (phase.num_drafters > phase.most_draft_sessions == 0 and time.monotonic() < began + _LONGEST_LOOK_S)
            ):
                await asyncio.sleep(_LOOK_EVERY_S)
                phase.most_draft_sessions = max(phase.most_draft_sessions, await _num_draft_sessions(fleet))
            phase.report.seconds = time.monotonic() - began
        under_load.over = True
    return phases, await leftovers(fleet)


class _Load:
    """Requests one after another, until it is over; what comes of one is told to the phase in which it began."""

    def __init__(
        self, fleet: Fleet, load: Load, references: Sequence[Received], progress: Callable[[int], None]
    ) -> None:
        self.over = False
        self.report = Report()
        self._fleet = fleet
        self._load = load
        self._references = references
        self._progress = progress
        self._indices: Iterator[int] = itertools.count()

    async def run(self) -> None:
        while not self.over:
            report = self.report
            await compared_request(self._fleet.urls, self._load, next(self._indices), self._references, report)
            report.num_requests += 1
            self._progress(1)


async def _scale_to(fleet: Fleet, num_drafters: int) -> None:
    """The first so many serve when it returns; the others are gone."""
    parts = fleet.of_kind("drafter")
    await asyncio.gather(*(part.drain() for part in parts[num_drafters:]))
    wanted = parts[:num_drafters]
    for part in wanted:
        if part.process is None:
            part.start()
    await asyncio.gather(*(fleet.wait_serving(part) for part in wanted))


async def _num_draft_sessions(fleet: Fleet) -> int:
    """0 too when a drafter is too busy to say."""
    running = [part for part in fleet.of_kind("drafter") if part.process is not None]
    try:
        return sum(info.num_sessions for info in await asyncio.gather(*map(fleet.drafter_info, running)))
    except grpc.aio.AioRpcError:
        return 0
