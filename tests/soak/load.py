"""A closed loop: so many clients, each asks for the next thing as soon as the last one has come.

Not here: what they ask for (requests.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from outrider.shared.errors import OutriderError
from tests.soak.requests import KINDS, TIMED, Asker, Kind, Wrong
from tests.soak.verdict import Answer

_MOST_FAILURES = 50


@dataclass
class Tally:
    counts: Counter[str] = field(default_factory=Counter)
    answers: list[Answer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)


class SoakLoad:
    """`go_on` lets the clients ask, `pause` returns when nothing runs any more."""

    def __init__(
        self, url: str, grpc_address: str, *, num_clients: int, deadline_s: float, seed: int, started_s: float
    ) -> None:
        """deadline_s: what takes longer hangs. started_s: on the monotonic clock, from where times count."""
        self.tally = Tally()
        self._started_s = started_s
        self._http = httpx.AsyncClient(base_url=url, timeout=deadline_s, limits=httpx.Limits(max_connections=None))
        self._rng = random.Random(seed)
        self._asker = Asker(self._http, grpc_address, self._rng)
        self._num_clients = num_clients
        self._deadline_s = deadline_s
        # Each once first, however few requests a slow machine is through with.
        self._due = list(KINDS)
        self._number = 0
        self._may_run = asyncio.Event()
        self._num_running = 0
        self._nothing_runs = asyncio.Event()
        self._nothing_runs.set()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [asyncio.create_task(self._client()) for _ in range(self._num_clients)]
        return self

    async def __aexit__(self, *_: Any) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.aclose()

    async def pause(self) -> None:
        self._may_run.clear()
        await self._nothing_runs.wait()

    def go_on(self) -> None:
        self._may_run.set()

    async def _client(self) -> None:
        kinds, weights = list(KINDS), list(KINDS.values())
        while True:
            await self._may_run.wait()
            self._number += 1
            self._num_running += 1
            self._nothing_runs.clear()
            try:
                kind = self._due.pop() if self._due else self._rng.choices(kinds, weights)[0]
                await self._ask(kind, self._number)
            finally:
                self._num_running -= 1
                if not self._num_running:
                    self._nothing_runs.set()

    async def _ask(self, kind: Kind, number: int) -> None:
        name = kind.__name__
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._deadline_s):
                await kind(self._asker, number)
        except (Wrong, TimeoutError, httpx.HTTPError, OutriderError) as error:
            if len(self.tally.failures) < _MOST_FAILURES:
                self.tally.failures.append(f"{name} {number}: {type(error).__name__}: {error}")
            return
        self.tally.counts[name] += 1
        if kind in TIMED:
            ended = time.monotonic()
            self.tally.answers.append(Answer(ended - self._started_s, ended - began))
