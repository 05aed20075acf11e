"""A whole stack on one machine as child processes: Redis, verifier, drafters, gateway.

Not here: what the services do, and their command lines (stack_commands). Their ports are free ones, read from the line
each prints when it is SERVING; their output goes to files in the run folder, whose `stack.json` says what runs where.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from client.installation import check_server_installed
from client.stack_commands import StackSettings, StackState, drafter_command, gateway_command, verifier_command
from shared.errors import ConfigError, OutriderError
from shared.speculative_config import parse_speculative_config

_SERVING = re.compile(r"serving on (\S+):(\d+)")
_LOADING_STEP = re.compile(r"INFO (?:verifier|drafter): (.+)")
_TERM_GRACE_S = 10.0
_KILL_GRACE_S = 5.0
_WRONG_SETTING = 2
Progress = Callable[[str], None]


class StackError(OutriderError):
    """A process of the stack did not start, or died."""


class Stack:
    """Starts on `start`, stops on `stop`; a failed start stops what it had started."""

    def __init__(self, settings: StackSettings, run_dir: Path, progress: Progress) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._progress = progress
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.state = StackState()

    def start(self) -> StackState:
        """Returns when /ready says so. Raises ConfigError, or StackError with the tail of the log of what failed."""
        check_server_installed()
        settings = self._settings
        parse_speculative_config(settings.speculative_config)  # before models are loaded
        self._run_dir.mkdir(parents=True, exist_ok=True)
        running = read_state(self._run_dir)
        if running is not None:
            raise ConfigError(f"a stack is running already at {running.url}; `outrider down` stops it")
        try:
            self.state.redis_url = settings.redis_url or self._start_redis()
            self._spawn("verifier", verifier_command(settings))
            drafters = [f"drafter-{number}" for number in range(settings.num_drafters)]
            for name in drafters:
                self._spawn(name, drafter_command(settings))
            self._progress("loading the target and the draft model")
            self.state.verifiers = [self._wait_serving("verifier")]
            self.state.drafters = [self._wait_serving(name) for name in drafters]
            self._progress("starting the gateway")
            self._spawn("gateway", self._gateway_command())
            self.state.url = f"http://{self._wait_serving('gateway')}"
            self.state.grpc_address = f"{settings.host}:{settings.grpc_port}"
            self._wait_ready()
            self.state.pids = {name: process.pid for name, process in self._processes.items()}
            self._write_state()
        except BaseException:
            self.stop()
            raise
        return self.state

    def wait(self) -> str:
        """Returns the name of the first process that ends."""
        while True:
            for name, process in self._processes.items():
                if process.poll() is not None:
                    return name
            time.sleep(0.2)

    def stop(self) -> None:
        """Gateway first, so that it drains while the others still answer."""
        for name, process in reversed(self._processes.items()):
            _terminate(process.pid, lambda process=process: process.poll() is not None)  # type: ignore[misc]
            self._progress(f"{name} stopped")
        (self._run_dir / "stack.json").unlink(missing_ok=True)

    def log_tail(self, name: str, num_lines: int = 15) -> str:
        lines = self._log_path(name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-num_lines:])

    def _write_state(self) -> None:
        """At once as a whole: other commands look for it at any moment."""
        path = self._run_dir / "stack.json"
        unfinished = path.with_suffix(".new")
        unfinished.write_text(json.dumps(asdict(self.state), indent=2))
        unfinished.replace(path)

    def _log_path(self, name: str) -> Path:
        return self._run_dir / f"{name}.log"

    def _spawn(self, name: str, command: list[str]) -> None:
        # Idle OpenMP threads that spin for long take the cores the other services compute on; ones that sleep at once
        # have to be woken for each of a hundred operations in a forward. A fraction of a millisecond bridges those: a
        # forward of 48 rows 63 -> 85 ms without any spinning, 67 with this much (docs/log.md). Weights in huge pages,
        # where the system grants them: plain decoding 1.01, drafts 1.04 times as fast at one stream.
        environment = {
            "OMP_WAIT_POLICY": "PASSIVE",
            "GOMP_SPINCOUNT": "20000",
            "THP_MEM_ALLOC_ENABLE": "1",
            **os.environ,
        }
        with self._log_path(name).open("wb") as log_file:
            self._processes[name] = subprocess.Popen(
                command,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=environment,
            )

    def _start_redis(self) -> str:
        server = find_redis(self._progress)
        port = free_port()
        data_dir = self._run_dir / "redis"
        data_dir.mkdir(exist_ok=True)
        self._progress("starting Redis")
        self._spawn(
            "redis",
            [
                *(server, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(data_dir.resolve())),
                # What is committed outlives a Redis that is killed; `everysec` is what Compose and Kubernetes say too.
                *("--save", "", "--appendonly", "yes", "--appendfsync", "everysec"),
            ],
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if redis_answers(port):
                return f"redis://127.0.0.1:{port}/0"
            self._check_alive("redis")
            time.sleep(0.05)
        raise StackError(f"Redis did not start:\n{self.log_tail('redis')}")

    def _gateway_command(self) -> list[str]:
        return gateway_command(self._settings, self.state)

    def _wait_serving(self, name: str) -> str:
        """Address of the service once it serves; meanwhile what it says of its loading is passed on."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        num_told = 0
        while time.monotonic() < deadline:
            text = self._log_path(name).read_text(errors="replace")
            match = _SERVING.search(text)
            if match:
                return f"{match[1]}:{match[2]}"
            steps = _LOADING_STEP.findall(text)
            for step in steps[num_told:]:
                self._progress(f"{name}: {step}")
            num_told = len(steps)
            self._check_alive(name)
            time.sleep(0.05)
        raise StackError(f"{name} is not serving after {self._settings.start_timeout_s:.0f} s:\n{self.log_tail(name)}")

    def _check_alive(self, name: str) -> None:
        code = self._processes[name].poll()
        if code is not None:
            # Services end with 2 for a wrong setting, a refused model or a taken port: the caller's to mend.
            kind = ConfigError if code == _WRONG_SETTING else StackError
            raise kind(f"{name} ended with exit code {code}:\n{self.log_tail(name)}")

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + 30
        reason = ""
        while time.monotonic() < deadline:
            self._check_alive("gateway")
            try:
                with urllib.request.urlopen(f"{self.state.url}/ready", timeout=2):
                    return
            except urllib.error.HTTPError as error:
                reason = error.read().decode(errors="replace")
            except OSError as error:
                reason = str(error)
            time.sleep(0.1)
        raise StackError(f"the gateway is not ready: {reason}")


def read_state(run_dir: Path) -> StackState | None:
    """The stack that runs from this folder, or None; a leftover of one that is gone is removed."""
    path = run_dir / "stack.json"
    if not path.is_file():
        return None
    state = StackState(**json.loads(path.read_text()))
    if not any(_alive(pid) for pid in state.pids.values()):
        path.unlink()
        return None
    return state


def stop_running(run_dir: Path, progress: Progress) -> bool:
    """Stops a stack that another command started; False when there is none."""
    state = read_state(run_dir)
    if state is None:
        return False
    for name, pid in reversed(state.pids.items()):
        _terminate(pid, lambda pid=pid: not _alive(pid))  # type: ignore[misc]
        progress(f"{name} stopped")
    (run_dir / "stack.json").unlink(missing_ok=True)
    return True


def find_redis(progress: Progress) -> str:
    """Path of redis-server; installed by apt where that is possible. Raises ConfigError that says how to get it."""
    found = shutil.which("redis-server")
    if found:
        return found
    if os.geteuid() == 0 and shutil.which("apt-get"):
        progress("installing redis-server with apt")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "redis-server"]):
            subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
        found = shutil.which("redis-server")
        if found:
            return found
    raise ConfigError(
        "redis-server is not on the PATH. Install it (Debian, Ubuntu: sudo apt-get install redis-server; "
        "macOS: brew install redis) or name a running one with --redis-url redis://host:6379/0"
    )


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def redis_answers(port: int) -> bool:
    """Whether a Redis at 127.0.0.1 serves: while it reads what it kept it takes connections, and refuses commands."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
        connection.sendall(b"PING\r\n")
        return connection.recv(64).startswith(b"+PONG")
    return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    # A zombie still has a pid; it is gone for every purpose here.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _terminate(pid: int, ended: Callable[[], bool]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + _TERM_GRACE_S
    while time.monotonic() < deadline:
        if ended():
            return
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + _KILL_GRACE_S
    while not ended() and time.monotonic() < deadline:  # asking also reaps our own child
        time.sleep(0.05)
