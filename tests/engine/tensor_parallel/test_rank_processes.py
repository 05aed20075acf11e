"""Every thread that waits for a rank's end learns its exit code."""

from __future__ import annotations

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context

import pytest

from outrider.engine.tensor_parallel.rank_processes import RankProcesses

NUM_THREADS = 8  # threads; several wait in the service: the one that watches, and each whose forward has failed


@pytest.mark.parametrize("attempt", range(5))
def test_all_waiting_threads_learn_the_exit_code(attempt: int) -> None:
    process = get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    ranks = RankProcesses([process])
    (pid,) = ranks.pids
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        waiting = [pool.submit(ranks.death, 30) for _ in range(NUM_THREADS)]
        os.kill(pid, signal.SIGKILL)
        said = {future.result() for future in waiting}
    assert said == {"tensor-parallel rank 1 has died (exit code -9)"}


def test_ranks_that_live_are_not_reported_and_can_be_stopped() -> None:
    process = get_context("fork").Process(target=time.sleep, args=(60,))
    process.start()
    ranks = RankProcesses([process])
    assert ranks.death(0) is None
    ranks.stop(0.1)
    assert process.exitcode == -signal.SIGKILL
