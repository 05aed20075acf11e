"""An event loop whose clock is virtual, and whose next step is chosen by a seed among the processes that are simulated.

A process (`Process`) has lanes: its event loop, and its engine's thread. Steps of one lane run in order, as asyncio
promises; which lane goes next is drawn. Time passes only when no lane has anything to do. A killed process runs no
further step, not even its `finally` blocks; a paused one runs its steps when it goes on.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

# steps; at one instant of virtual time; more is an endless loop
_MOST_STEPS_AT_ONCE = 200_000
# rounds of steps, each after another cancellation of all tasks
_MOST_CLEANING_STEPS = 50
# seconds of virtual time; longest that a function on another thread takes
_LONGEST_THREAD_S = 0.01

_LANE: contextvars.ContextVar[Lane | None] = contextvars.ContextVar("lane", default=None)


class Step:
    """What asyncio.Handle and TimerHandle are, without what this loop has no use for. when_s: of a timer."""

    __slots__ = ("_args", "_callback", "_is_cancelled", "context", "when_s")

    def __init__(
        self, callback: Any, args: tuple[Any, ...], context: contextvars.Context | None, when_s: float = 0.0
    ) -> None:
        self._callback, self._args, self._is_cancelled = callback, args, False
        self.context = contextvars.copy_context() if context is None else context
        self.when_s = when_s

    def cancel(self) -> None:
        self._is_cancelled = True
        self._callback = self._args = None

    def cancelled(self) -> bool:
        return self._is_cancelled

    def when(self) -> float:
        return self.when_s

    def run(self) -> None:
        self.context.run(self._callback, *self._args)


class StandsStill(Exception):
    """Nothing can happen any more, or everything happens at one instant."""


class Lane:
    """One thread of a process: its steps, in order."""

    def __init__(self, process: Process, name: str) -> None:
        self.process = process
        self.name = name
        self.steps: deque[Step] = deque()
        self._context = contextvars.Context()
        self._context.run(_LANE.set, self)

    @property
    def context(self) -> contextvars.Context:
        """A fresh context: what runs in it runs in this lane."""
        return self._context.copy()


class Process:
    """A simulated process. clock_offset_s: of its wall clock. is_older: it is of the older version (older_wire.py)."""

    def __init__(self, loop: SimLoop, name: str, *, is_older: bool = False) -> None:
        self.name = name
        self.is_older = is_older
        self.clock_offset_s = 0.0
        self.is_dead = self.is_paused = False
        self.paused_at = 0.0
        self.tasks: list[asyncio.Task[Any]] = []
        self.problems: list[str] = []
        self._loop = loop
        loop.processes.append(self)
        self._lanes: list[Lane] = []
        self.main = self.lane("main")

    def lane(self, name: str) -> Lane:
        lane = Lane(self, name)
        self._lanes.append(lane)
        return lane

    def spawn(self, work: Any) -> asyncio.Task[Any]:
        return self._loop.create_task(work, context=self.main.context)

    def kill(self) -> None:
        self.is_dead = True
        for lane in self._lanes:
            self._loop.forget(lane)

    def pause(self) -> None:
        self.is_paused, self.paused_at = True, self._loop.time()
        for lane in self._lanes:
            self._loop.forget(lane)

    def go_on(self) -> None:
        self.is_paused = False
        for lane in self._lanes:
            self._loop.remember(lane)

    @property
    def open_tasks(self) -> list[asyncio.Task[Any]]:
        self.tasks = [task for task in self.tasks if not task.done()]
        return self.tasks


def current_lane() -> Lane | None:
    return _LANE.get()


class SimLoop(asyncio.AbstractEventLoop):
    """Runs handles of all processes. on_problem: called with each error that nobody handles."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._now = 0.0
        self.processes: list[Process] = []
        self.num_steps = 0
        self.problems: list[str] = []
        self._timers: list[tuple[float, int, Step]] = []
        self._timer_numbers = itertools.count()
        self._ready: list[Lane] = []
        self._kept: list[object] = []  # or the garbage collector would run `finally` blocks of killed processes
        self._tasks: list[asyncio.Task[Any]] = []
        self._closed = False
        self.outside = Process(self, "outside")

    # ---- what runs next ----

    def run_until_complete(self, future: Any) -> Any:
        """Runs a coroutine, in the lane of nobody's process, until it is done."""
        task = self.create_task(future, context=self.outside.main.context)
        asyncio._set_running_loop(self)
        try:
            while not task.done():
                self._step()
        finally:
            asyncio._set_running_loop(None)
        return task.result()

    def _step(self) -> None:
        if not self._ready:
            self._pass_time()
        place = self._rng.randrange(len(self._ready)) if len(self._ready) > 1 else 0
        lane = self._ready[place]
        step = lane.steps.popleft()
        if not lane.steps:
            self._ready[place] = self._ready[-1]
            self._ready.pop()
        self.num_steps += 1
        self._num_at_once += 1
        if self._num_at_once > _MOST_STEPS_AT_ONCE:
            raise StandsStill(f"{_MOST_STEPS_AT_ONCE} steps at {self._now:.6f} s")
        if not step.cancelled():
            try:
                step.run()
            except (SystemExit, KeyboardInterrupt):
                raise
            except BaseException as error:
                self.call_exception_handler({"message": f"a step failed: {step}", "exception": error})

    def _pass_time(self) -> None:
        self._num_at_once = 0
        while self._timers and not self._ready:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if not timer.cancelled():
                self._enqueue(timer)
        if not self._ready:
            raise StandsStill("no step and no timer is left")
        while self._timers and self._timers[0][0] <= self._now:
            _, _, timer = heapq.heappop(self._timers)
            if not timer.cancelled():
                self._enqueue(timer)

    _num_at_once = 0

    def _enqueue(self, step: Step) -> None:
        lane: Lane | None = step.context.get(_LANE)
        lane = lane or self.outside.main
        if lane.process.is_dead:
            self._kept.append(step)
            return
        lane.steps.append(step)
        if len(lane.steps) == 1 and not lane.process.is_paused:
            self._ready.append(lane)

    def forget(self, lane: Lane) -> None:
        if lane in self._ready:
            self._ready.remove(lane)
        if lane.process.is_dead:
            self._kept.extend(lane.steps)

    def remember(self, lane: Lane) -> None:
        if lane.steps and not lane.process.is_dead:
            self._ready.append(lane)

    # ---- asyncio's interface ----

    def time(self) -> float:
        return self._now

    def call_soon(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        step = Step(callback, args, context)
        self._enqueue(step)
        return step

    def call_soon_threadsafe(self, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        """From an engine's lane: the callback runs in its process's main lane."""
        lane = current_lane()
        if context is None and lane is not None:
            context = lane.process.main.context
        return self.call_soon(callback, *args, context=context)

    def call_later(self, delay: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Any, *args: Any, context: contextvars.Context | None = None) -> Any:
        timer = Step(callback, args, context, when)
        heapq.heappush(self._timers, (when, next(self._timer_numbers), timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Any = None, **more: Any) -> asyncio.Task[Any]:
        lane: Lane | None = _LANE.get() if context is None else context.get(_LANE)
        task = asyncio.Task(coro, loop=self, name=name, context=context, **more)
        (lane.process if lane is not None else self.outside).tasks.append(task)
        self._tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """The function is one step, a while later."""
        future = self.create_future()

        def run() -> None:
            if future.cancelled():
                return
            try:
                future.set_result(func(*args))
            except Exception as error:
                future.set_exception(error)

        self.call_later(self._rng.random() * _LONGEST_THREAD_S, run)
        return future

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.problems.append(f"{context.get('message')}: {error!r}")

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self.call_exception_handler(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._closed

    def is_closed(self) -> bool:
        return self._closed

    def dispose(self) -> None:
        """Cancels all tasks, those of killed processes too, once all has been looked at: else the garbage collector
        would end them, at any moment, with a warning for each.
        """
        for process in self.processes:
            process.is_dead = False
            if process.is_paused:
                process.go_on()
        asyncio._set_running_loop(self)
        try:
            with suppress(StandsStill):
                for _ in range(_MOST_CLEANING_STEPS):
                    left = [task for task in self._tasks if not task.done()]
                    for task in left:
                        task.cancel()
                    if not left:
                        break
                    for _ in range(len(self._tasks)):
                        self._step()
        finally:
            asyncio._set_running_loop(None)
        for task in self._tasks:
            if not task.done():
                task._log_destroy_pending = False  # type: ignore[attr-defined]
            elif not task.cancelled():
                task.exception()  # seen

    def close(self) -> None:
        self._closed = True
        self._timers.clear()
        self._kept.clear()
        # FastAPI remembers the last 4,096 routes, and so this loop, of some 80 simulations.
        self._tasks.clear()
        self.processes.clear()
