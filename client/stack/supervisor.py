"""Starts the processes of a running stack again when they die, each on the port that it had.

In the foreground the loop runs in `outrider up`, `serve` or `demo` itself; `up --detach` leaves it behind as a process:

    python -m outrider.client.stack.supervisor RUN_DIR

`stack.json` says what to start; once the stack runs, nobody else writes it. Not here: the first start and the stop
(processes.py).
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from outrider.client.stack.commands import SUPERVISOR, StackState
from outrider.client.stack.process import has_ended
from outrider.client.stack.processes import Progress, read_state, start_process, write_state

# seconds; time between two checks of the processes
_LOOK_S = 0.2
# seconds; delay before the first restart, and its maximum; it doubles for each death soon after a start
_FIRST_DELAY_S = 0.5
_LONGEST_DELAY_S = 30.0
# seconds; a process that has lived this long since its last restart begins with the first delay again
_STABLE_S = 60.0


@dataclass
class _Backoff:
    """The restart delay of one process, in monotonic seconds. due_at: time of its restart; None: it runs."""

    delay_s: float = 0.0
    started_at: float = 0.0
    due_at: float | None = None

    def died(self, now: float) -> None:
        lived_long = now - self.started_at >= _STABLE_S
        self.delay_s = _FIRST_DELAY_S if lived_long or not self.delay_s else min(2 * self.delay_s, _LONGEST_DELAY_S)
        self.due_at = now + self.delay_s


def supervise(run_dir: Path, state: StackState, progress: Progress, stop: threading.Event) -> None:
    """Restarts processes that end, and keeps `state` and stack.json current, until `stop` is set.

    Waits while the disk is full or no process can be started. Raises OSError if stack.json cannot be written at first.
    """
    state.record(SUPERVISOR, os.getpid())
    write_state(run_dir, state)
    written = copy.deepcopy(state)
    backoffs = {name: _Backoff() for name in state.commands}
    while not stop.wait(_LOOK_S):
        for name, backoff in backoffs.items():
            now = time.monotonic()
            if backoff.due_at is None:
                if has_ended(state.pids[name], state.identities[name]):
                    backoff.died(now)
                    progress(f"{name} died; starting it again in {backoff.delay_s:g} s (see {run_dir / name}.log)")
            elif now >= backoff.due_at:
                try:
                    process = start_process(run_dir, state, name)
                except OSError as error:
                    backoff.died(now)
                    progress(f"{name} cannot be started ({error}); trying again in {backoff.delay_s:g} s")
                    continue
                process.returncode = 0  # Popen would warn that nobody waits: has_ended does
                state.num_restarts[name] = state.num_restarts.get(name, 0) + 1
                backoff.started_at, backoff.due_at = now, None
        if state != written:
            with contextlib.suppress(OSError):  # at the next look
                write_state(run_dir, state)
                written = copy.deepcopy(state)


def main() -> None:
    run_dir = Path(sys.argv[1])
    state = read_state(run_dir)
    if state is None:
        raise SystemExit(f"no stack is running from {run_dir}")
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda _signum, _frame: stop.set())
    supervise(run_dir, state, _log, stop)


def _log(message: str) -> None:
    with contextlib.suppress(OSError):  # a full disk must not end the supervisor
        print(message, flush=True)


if __name__ == "__main__":
    main()
