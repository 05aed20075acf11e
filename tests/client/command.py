"""`outrider` as users run it: a process, its output, its exit code; in a terminal where that matters."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.client.stack.commands import StackState
from outrider.client.stack.own_redis import redis_url_of
from tests.ports import server_port

ROOT = Path(__file__).parents[2]
OUTRIDER = str(Path(sys.executable).with_name("outrider"))
# Loading takes 10 s on two idle cores; on busy ones it may take minutes.
TIMEOUT_S = 280


def outrider(
    *arguments: str, cwd: Path = ROOT, stdin: str | None = None, **environ: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", **environ}
    return subprocess.run(
        [OUTRIDER, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
    )


# Makes standard input the terminal that Ctrl-C comes from, also where the tests run with SIGINT ignored. A program and
# no preexec_fn: with that this process is forked, and gRPC's threads do not survive it.
_OWN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


@contextmanager
def another_gateway(stack: StackState, *arguments: str, model: Path) -> Iterator[tuple[str, str]]:
    """URL and gRPC address of one more gateway to the fleet of `stack`."""
    grpc_port = server_port()
    command = [
        sys.executable,
        "-m",
        "outrider.gateway",
        "--model",
        str(model),
        "--port",
        "0",
        "--grpc-port",
        str(grpc_port),
    ]
    command += ["--verifiers", stack.verifiers[0], "--drafters", stack.drafters[0], "--redis-url", redis_url_of(stack)]
    with subprocess.Popen(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        found = next(match for line in process.stdout if (match := re.search(r"serving on (\S+)", line)))
        yield f"http://{found[1]}", f"127.0.0.1:{grpc_port}"
        process.terminate()
        process.stdout.read()


class Terminal:
    """A command with a terminal on all three of its ends; leaves with the test."""

    def __init__(self, *arguments: str) -> None:
        self._ours, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", _OWN_TERMINAL, OUTRIDER, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def until_it_waits(self) -> None:
        """A prompt is shown a moment before Python waits for keys, and a Ctrl-C in between is seen with the next key.
        Returns when the command sleeps, at several looks: for a key, as there is nothing else left to do.
        """
        deadline = time.monotonic() + TIMEOUT_S
        num_asleep = 0
        while num_asleep < 10:
            assert time.monotonic() < deadline, "it never waits"
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            num_asleep = num_asleep + 1 if state == "S" else 0
            time.sleep(0.02)

    def read_until(self, wanted: str) -> str:
        """What was written since the last call, up to `wanted` and with it."""
        deadline = time.monotonic() + TIMEOUT_S
        while wanted not in self.seen:
            if not self._read_more(deadline):
                raise AssertionError(f"{wanted!r} did not come, but {self.seen!r}")
        before, _, self.seen = self.seen.partition(wanted)
        return before + wanted

    def exit_code(self) -> int:
        deadline = time.monotonic() + TIMEOUT_S
        while self._read_more(deadline):
            pass
        return self._process.wait(timeout=TIMEOUT_S)

    def _read_more(self, deadline: float) -> bool:
        """False when the command has closed the terminal, or time is over."""
        ready, _, _ = select.select([self._ours], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # how Linux says that the other end is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)
