"""One process of a stack: started in a session of its own, looked at and ended by its pid."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from outrider.client.stack.process_identity import process_identity

# seconds; the kernel's time to end a killed process
_KILL_GRACE_S = 5.0
# Becomes the program in its arguments, which SIGTERM ends when the thread that started it does (man 2 prctl). A program
# and no preexec_fn: with that our own process is forked, and gRPC's threads do not survive it.
_ENDING_WITH_PARENT = """
import ctypes, os, signal, sys
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
if os.getppid() != int(sys.argv[1]):  # it ended before this was asked for
    sys.exit(1)
signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it, and its successor would too
os.execvp(sys.argv[2], sys.argv[2:])
"""


def spawn(
    run_dir: Path,
    name: str,
    command: list[str],
    environment: Mapping[str, str] | None = None,
    *,
    umask: int = -1,
    ends_with_us: bool = False,
) -> subprocess.Popen[bytes]:
    """Starts a process in a session of its own, whose output is appended to NAME.log.

    umask: -1: ours. ends_with_us: it gets SIGTERM when the calling thread ends, even by SIGKILL (on Linux).
    """
    # Idle OpenMP threads that spin for long take cores from the other services; ones that sleep at once must be
    # woken for every operation of a forward. This spin count bridges those: 85 -> 67 ms for a forward of 48 rows
    # (docs/log.md). Weights go into huge pages where the system grants them.
    variables = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "20000",
        "THP_MEM_ALLOC_ENABLE": "1",
        "GRPC_VERBOSITY": "NONE",  # its lines are not in the logs' form, and errors reach us by status
        **os.environ,
        **(environment or {}),
    }
    if ends_with_us and sys.platform == "linux":
        command = [sys.executable, "-ISc", _ENDING_WITH_PARENT, str(os.getpid()), *command]
    with (run_dir / f"{name}.log").open("ab") as log_file:
        return subprocess.Popen(
            command,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=variables,
            umask=umask,
        )


def has_ended(pid: int, identity: str) -> bool:
    """Returns whether a process has ended, and reaps it if it is our child. identity: process_identity at its start."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return process_identity(pid) != identity


def terminate(pid: int, identity: str, grace_s: float) -> None:
    """SIGTERM, and after `grace_s` SIGKILL. Returns once it has ended; a later process with its pid is let be."""
    if not identity or process_identity(pid) != identity:
        return
    for signum, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, _KILL_GRACE_S)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if has_ended(pid, identity):
                return
            time.sleep(0.05)
