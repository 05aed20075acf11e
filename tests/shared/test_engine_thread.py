"""The engines' thread: every command runs once and in order, nothing sleeps through news, nobody waits for nobody."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from outrider.shared.engine_thread import EngineThread

LONG_S = 30.0


class Jobs:
    """Jobs are put in by commands, one is done per piece of work; everything is written down."""

    def __init__(self, patience_s: Callable[[], float] = lambda: 0.0) -> None:
        self.waiting: list[int] = []
        self.batches: list[list[int]] = []
        self.commands: list[int] = []
        self.threads: set[int] = set()
        self.progress = threading.Condition()
        self.thread = EngineThread("jobs", has_work=lambda: bool(self.waiting), work=self._work, patience_s=patience_s)

    def _work(self) -> None:
        self.threads.add(threading.get_ident())
        with self.progress:
            if self.waiting:
                self.batches.append(self.waiting)
                self.waiting = []
            self.progress.notify_all()

    def put(self, job: int) -> None:
        def command() -> None:
            self.threads.add(threading.get_ident())
            with self.progress:
                self.commands.append(job)
                self.waiting.append(job)
                self.progress.notify_all()

        self.thread.command(command)

    def done(self) -> list[int]:
        return [job for batch in self.batches for job in batch]

    def until(self, condition: Callable[[], bool]) -> None:
        with self.progress:
            assert self.progress.wait_for(condition, timeout=LONG_S / 2)


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    running = Jobs()
    running.thread.start()
    yield running
    running.thread.stop()


def test_commands_of_many_threads_all_run_once_each_threads_in_order(jobs: Jobs) -> None:
    def feed(number: int) -> None:
        for count in range(500):
            jobs.put(1000 * number + count)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(feed, range(8)))
    jobs.until(lambda: len(jobs.done()) == 4000)
    assert sorted(jobs.commands) == sorted(1000 * number + count for number in range(8) for count in range(500))
    for number in range(8):
        own = [job for job in jobs.done() if job // 1000 == number]
        assert own == list(range(1000 * number, 1000 * number + 500))
    assert len(jobs.threads) == 1
    assert threading.get_ident() not in jobs.threads


def test_no_wake_up_is_lost(jobs: Jobs) -> None:
    """Each round the thread has gone to sleep or is just about to: a lost notice would stop the game for good."""
    for job in range(3000):
        jobs.put(job)
        jobs.until(lambda job=job: len(jobs.done()) > job)  # type: ignore[misc]
    assert jobs.batches == [[job] for job in range(3000)]


def test_a_command_may_give_another_one(jobs: Jobs) -> None:
    jobs.thread.command(lambda: jobs.put(7))
    jobs.until(lambda: jobs.done() == [7])


def test_commands_before_the_start_run_after_it() -> None:
    jobs = Jobs()
    jobs.put(1)
    jobs.put(2)
    jobs.thread.start()
    jobs.until(lambda: len(jobs.done()) == 2)
    jobs.thread.stop()
    assert jobs.batches == [[1, 2]]


def test_work_goes_on_without_commands_while_there_is_any() -> None:
    left = [5]
    ended = threading.Event()

    def work() -> None:
        left[0] -= 1
        if left[0] == 0:
            ended.set()

    thread = EngineThread("counting", has_work=lambda: left[0] > 0, work=work)
    thread.start()
    assert ended.wait(LONG_S / 2)
    thread.stop()
    assert left == [0]


def test_patience_gathers_what_comes_in_time() -> None:
    """Until three are there it waits, as the engines do for sessions that will be back."""
    gathering = Jobs(patience_s=lambda: LONG_S if 0 < len(gathering.waiting) < 3 else 0.0)
    gathering.thread.start()
    started = time.perf_counter()
    for job in range(6):
        gathering.put(job)
        gathering.until(lambda job=job: len(gathering.commands) > job)  # type: ignore[misc]
    gathering.until(lambda: len(gathering.done()) == 6)
    gathering.thread.stop()
    assert gathering.batches == [[0, 1, 2], [3, 4, 5]]
    assert time.perf_counter() - started < LONG_S / 2


def test_patience_ends_when_nobody_comes() -> None:
    waiting = Jobs(patience_s=lambda: 0.05 if waiting.waiting else 0.0)
    waiting.thread.start()
    started = time.perf_counter()
    waiting.put(1)
    waiting.until(lambda: waiting.done() == [1])
    assert 0.045 <= time.perf_counter() - started < LONG_S / 2
    waiting.thread.stop()


@pytest.mark.parametrize("patience_s", [0.0, -1.0])
def test_without_patience_each_job_is_done_at_once(patience_s: float) -> None:
    """The condition is never waited on between the command and the work."""
    asked: list[int] = []

    def patience() -> float:
        asked.append(len(hasty.waiting))
        return patience_s

    hasty = Jobs(patience)
    hasty.thread.start()
    for job in range(50):
        hasty.put(job)
        hasty.until(lambda job=job: len(hasty.done()) > job)  # type: ignore[misc]
    hasty.thread.stop()
    assert hasty.batches == [[job] for job in range(50)]
    assert asked.count(1) == 50


def test_stopping_does_not_wait_for_patience() -> None:
    waits = threading.Event()

    def patience_s() -> float:
        if patient.waiting:
            waits.set()
            return LONG_S
        return 0.0

    patient = Jobs(patience_s)
    patient.thread.start()
    patient.put(1)
    assert waits.wait(LONG_S / 2)
    time.sleep(0.02)  # it is waiting by now
    started = time.perf_counter()
    patient.thread.stop()
    assert time.perf_counter() - started < LONG_S / 2
    assert patient.batches == [], "the job that patience held back is not begun any more"


def test_stopping_waits_for_the_work_in_progress_and_runs_nothing_after_it() -> None:
    begun, go_on = threading.Event(), threading.Event()
    ended: list[str] = []
    waiting = [True]

    def work() -> None:
        waiting[0] = False
        begun.set()
        assert go_on.wait(LONG_S / 2)
        ended.append("work")

    thread = EngineThread("slow", has_work=lambda: waiting[0], work=work)
    thread.start()
    assert begun.wait(LONG_S / 2)
    thread.command(lambda: ended.append("command"))
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    assert thread._stopping.wait(LONG_S / 2)
    assert stopping.is_alive()
    go_on.set()
    stopping.join(LONG_S / 2)
    assert not stopping.is_alive()
    assert ended == ["work"]


def test_an_idle_thread_stops_at_once() -> None:
    jobs = Jobs()
    jobs.thread.start()
    time.sleep(0.02)
    jobs.thread.stop()
    jobs.put(1)
    assert jobs.commands == []
