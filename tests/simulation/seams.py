"""Where the product meets the machine: clocks, random numbers and engines' threads, taken over for one simulation.

The product reads `time` and `secrets` through their modules (tests/simulation/test_seams.py), so it needs no change.
"""

from __future__ import annotations

import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from tests.simulation.loop import SimLoop, current_lane

# Unix seconds at the start of every simulation
EPOCH_S = 1_800_000_000.0
# seconds; an engine's work takes between these, times the pace of the seed
FORWARD_S = (0.001, 0.02)
# Of what is installed, whichever it is: answers name it, and how long they are decides how far a slow reader gets.
VERSION = "0.1.0"
PACES = (1.0, 4.0, 16.0)


class EngineSteps:
    """shared.engine_thread.EngineThread, whose rounds are steps of the loop: commands, patience, then work, which takes
    virtual time.
    """

    loop: SimLoop
    rng: random.Random
    pace: float

    def __init__(
        self,
        name: str,
        *,
        has_work: Callable[[], bool],
        work: Callable[[], None],
        patience_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        lane = current_lane()
        if lane is None:
            raise RuntimeError("an engine is made in the lane of its process")
        self._lane = lane.process.lane(name)
        self._has_work, self._work, self._patience_s = has_work, work, patience_s
        self._commands: deque[Callable[[], None]] = deque()
        self._is_busy = False  # a step of it is in the loop
        self._waiting: Any = None  # the timer of its patience
        self.is_stopped = False

    def start(self) -> None:
        self._wake()

    def stop(self) -> None:
        self.is_stopped = True

    def command(self, command: Callable[[], None]) -> None:
        self._commands.append(command)
        self._wake()

    def _wake(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting, self._is_busy = None, False
        if not self._is_busy:
            self._is_busy = True
            self.loop.call_soon(self._take_commands, context=self._lane.context)

    def _take_commands(self) -> None:
        if self.is_stopped:
            return
        while self._commands:
            self._commands.popleft()()
        patience_s = self._patience_s()
        if patience_s > 0.0:
            self._waiting = self.loop.call_later(patience_s, self._work_now, context=self._lane.context)
        else:
            self._work_now()

    def _work_now(self) -> None:
        self._waiting = None
        self.loop.call_later(self.pace * self.rng.uniform(*FORWARD_S), self._end_work, context=self._lane.context)

    def _end_work(self) -> None:
        if self.is_stopped:
            return
        self._work()
        self._is_busy = False
        if self._commands or self._has_work():
            self._wake()


@contextmanager
def taken_over(loop: SimLoop, rng: random.Random) -> Iterator[None]:
    """Within it, this thread's clocks are the loop's, and random numbers are the seed's."""
    thread = threading.get_ident()

    def clock(real: Callable[[], float], offset: Callable[[], float]) -> Callable[[], float]:
        return lambda: loop.time() + offset() if threading.get_ident() == thread else real()

    def wall_offset() -> float:
        lane = current_lane()
        return EPOCH_S + (lane.process.clock_offset_s if lane is not None else 0.0)

    def random_bytes(count: int | None = None) -> bytes:
        return rng.randbytes(32 if count is None else count)

    real_uuid4 = uuid.uuid4

    def uuid4() -> uuid.UUID:
        if sys._getframe(1).f_globals["__name__"].startswith("numba"):
            return real_uuid4()  # names files of its cache, which only the first run writes
        return uuid.UUID(bytes=rng.randbytes(16), version=4)

    real_sleep = time.sleep

    def no_sleep(seconds: float) -> None:
        if threading.get_ident() == thread:
            raise AssertionError("something sleeps, and all others with it")
        real_sleep(seconds)

    patches: list[tuple[Any, str, Any]] = [
        (time, "time", clock(time.time, wall_offset)),
        (time, "monotonic", clock(time.monotonic, lambda: 1000.0)),
        (time, "perf_counter", clock(time.perf_counter, lambda: 1000.0)),
        (time, "sleep", no_sleep),
        (secrets, "token_bytes", random_bytes),
        (secrets, "token_hex", lambda count=None: random_bytes(count).hex()),
        (secrets, "randbits", rng.getrandbits),
        (os, "urandom", random_bytes),
        (uuid, "uuid4", uuid4),
        (EngineSteps, "loop", loop),
        (EngineSteps, "rng", rng),
        (EngineSteps, "pace", rng.choice(PACES)),
    ]
    state = random.getstate()
    random.seed(rng.getrandbits(64))
    with ExitStack() as stack:
        stack.callback(random.setstate, state)
        for place, name, value in patches:
            stack.enter_context(mock.patch.object(place, name, value, create=True))
        for service in ("verifier_service", "drafter_service"):
            stack.enter_context(mock.patch(f"outrider.{service}.engine.EngineThread", EngineSteps))
        stack.enter_context(mock.patch("outrider.gateway.servers.live_service.outrider_version", return_value=VERSION))
        yield
