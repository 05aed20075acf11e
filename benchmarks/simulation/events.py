"""Simulated time: what happens when, and machines on which work takes time.

A heap of our own, not simpy: its processes are generators that wait for resources, and a forward that waits for
whoever is about to come back (verifier_service/timing/gathering.py) is no resource; nothing else of it would be used.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any, Protocol


class Events:
    """Events in virtual time: those of the same moment happen in the order in which they were scheduled."""

    def __init__(self) -> None:
        self.now = 0.0
        self.num_done = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._num_scheduled = 0

    def after(self, delay_s: float, action: Callable[..., None], *arguments: Any) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._num_scheduled, action, arguments))

    def run(self, until_s: float = float("inf")) -> None:
        """Until nothing is left to happen, or until that moment."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            self.now, _, action, arguments = heapq.heappop(heap)
            self.num_done += 1
            action(*arguments)


class Machine(Protocol):
    """Contract: `done` is called once the work, which takes `work_s` on a machine of its own, is done."""

    def run(self, work_s: float, done: Callable[[], None]) -> None: ...


class OwnMachine:
    """Nobody else is on it."""

    def __init__(self, events: Events) -> None:
        self._events = events

    def run(self, work_s: float, done: Callable[[], None]) -> None:
        self._events.after(work_s, done)


class SharedMachine:
    """Services that take every core when they run, on one machine: those that run share it evenly."""

    def __init__(self, events: Events) -> None:
        self._events = events
        # Seconds of work that are left, and what to do then.
        self._running: list[tuple[float, Callable[[], None]]] = []
        self._settled_at = 0.0
        self._version = 0

    def run(self, work_s: float, done: Callable[[], None]) -> None:
        self._settle()
        self._running.append((work_s, done))
        self._plan()

    def _settle(self) -> None:
        """Takes off what has been done since the last time."""
        if self._running:
            done_s = (self._events.now - self._settled_at) / len(self._running)
            self._running = [(left_s - done_s, done) for left_s, done in self._running]
        self._settled_at = self._events.now

    def _plan(self) -> None:
        self._version += 1
        if self._running:
            least_s = max(0.0, min(left_s for left_s, _ in self._running))
            self._events.after(least_s * len(self._running), self._finish, self._version)

    def _finish(self, version: int) -> None:
        if version != self._version:
            return  # somebody has come meanwhile: planned anew
        self._settle()
        place = min(range(len(self._running)), key=lambda index: self._running[index][0])
        _, done = self._running.pop(place)
        self._plan()
        done()
