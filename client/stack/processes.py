"""A whole stack on one machine as child processes: Redis, verifier, drafters, gateway.

Ports are free ones, read from the line each service prints when it is SERVING. Output goes to files in the run folder,
whose `stack.json` lists what runs where. Not here: what the services do, their command lines (commands.py), and what
happens when one dies (supervisor.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from outrider.client.stack.commands import (
    SUPERVISOR,
    StackSettings,
    StackState,
    drafter_command,
    gateway_command,
    verifier_command,
)
from outrider.client.stack.installation import check_server_installed
from outrider.client.stack.own_redis import password_of, redis_answers, redis_url_of, write_config
from outrider.client.stack.process import spawn, terminate
from outrider.shared.errors import ConfigError, OutriderError
from outrider.shared.speculative_config import parse_speculative_config

_SERVING = re.compile(r"serving on (\S+):(\d+)")
_LOADING_STEP = re.compile(r"INFO (?:verifier|drafter): (.+)")
_TERM_GRACE_S = 10.0
# seconds; a supervisor in the foreground stops every process of its stack before it ends
_SUPERVISOR_GRACE_S = 90.0
_WRONG_SETTING = 2
_SUPERVISOR_MODULE = "outrider.client.stack.supervisor"
Progress = Callable[[str], None]


class StackError(OutriderError):
    """A process of the stack did not start, or died."""


class Stack:
    """A stack; a failed `start` stops what it had started. in_foreground: it ends with the thread that starts it."""

    def __init__(
        self, settings: StackSettings, run_dir: Path, progress: Progress, *, in_foreground: bool = False
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._progress = progress
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.state = StackState(in_foreground=in_foreground)

    def __enter__(self) -> StackState:
        return self.start()

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def start(self) -> StackState:
        """Returns once /ready is ok. Raises ConfigError, or StackError with the end of the failed service's log."""
        check_server_installed()
        settings = self._settings
        parse_speculative_config(settings.speculative_config)  # before models are loaded
        self._run_dir.mkdir(parents=True, exist_ok=True)
        running = read_state(self._run_dir)
        if running is not None:
            raise ConfigError(f"a stack is already running at {running.url}; `outrider down` stops it")
        try:
            self.state.redis_url = settings.redis_url or self._start_redis()
            began = time.monotonic()
            self._spawn("verifier", verifier_command(settings))
            drafters = [f"drafter-{number}" for number in range(settings.num_drafters)]
            for name in drafters:
                self._spawn(name, drafter_command(settings))
            self._progress("loading the target and the draft model")
            self.state.verifiers = [self._wait_serving("verifier")]
            self.state.verifier_start_s = time.monotonic() - began
            self.state.drafters = [self._wait_serving(name) for name in drafters]
            self._progress("starting the gateway")
            self._spawn("gateway", self._gateway_command())
            self.state.url = f"http://{self._wait_serving('gateway')}"
            self.state.grpc_address = f"{settings.host}:{settings.client_grpc_port}"
            self._wait_ready()
            write_state(self._run_dir, self.state)
        except BaseException:
            self.stop()
            raise
        return self.state

    def leave_supervised(self) -> None:
        """Starts the process that restarts what dies; returns once it has taken over. Raises StackError."""
        process = spawn(self._run_dir, SUPERVISOR, [sys.executable, "-m", _SUPERVISOR_MODULE, str(self._run_dir)])
        deadline = time.monotonic() + self._settings.start_timeout_s
        while time.monotonic() < deadline and process.poll() is None:
            state = read_state(self._run_dir)
            if state is not None and SUPERVISOR in state.pids:
                self.state = state
                return
            time.sleep(0.05)
        process.kill()
        raise StackError(f"the supervisor did not start:\n{self.log_tail(SUPERVISOR)}")

    def stop(self) -> None:
        """Stops the gateway first: it drains while the others still answer."""
        _stop_all(self.state, self._progress)
        for process in self._processes.values():
            process.poll()  # or Python warns of it
        (self._run_dir / "stack.json").unlink(missing_ok=True)

    def log_tail(self, name: str) -> str:
        lines = self._log_path(name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-15:])

    def _log_path(self, name: str) -> Path:
        return self._run_dir / f"{name}.log"

    def _spawn(self, name: str, command: list[str]) -> None:
        self._log_path(name).unlink(missing_ok=True)
        self.state.commands[name] = command
        self._processes[name] = start_process(self._run_dir, self.state, name)

    def _start_redis(self) -> str:
        """Starts the stack's Redis and returns its URL, without the password."""
        server = find_redis(self._progress)
        port = free_port()
        data_dir = self._run_dir / "redis"
        config = write_config(data_dir).resolve()
        self.state.redis_config = str(config)
        self._progress("starting Redis")
        command = [server, str(config), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(data_dir.resolve())]
        self._spawn("redis", command)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if redis_answers(port, password_of(config)):
                return f"redis://127.0.0.1:{port}/0"
            self._check_alive("redis")
            time.sleep(0.05)
        raise StackError(f"Redis did not start:\n{self.log_tail('redis')}")

    def _gateway_command(self) -> list[str]:
        return gateway_command(self._settings, self.state)

    def _wait_serving(self, name: str) -> str:
        """The service's address once it serves; passes on its loading messages meanwhile."""
        deadline = time.monotonic() + self._settings.start_timeout_s
        num_shown = 0
        while time.monotonic() < deadline:
            text = self._log_path(name).read_text(errors="replace")
            match = _SERVING.search(text)
            if match:
                self.state.commands[name] += ["--port", match[2]]  # the last one counts
                return f"{match[1]}:{match[2]}"
            steps = _LOADING_STEP.findall(text)
            if len(steps) > num_shown:  # a large model, or a busy machine
                deadline = time.monotonic() + self._settings.start_timeout_s
            for step in steps[num_shown:]:
                self._progress(f"{name}: {step}")
            num_shown = len(steps)
            for started in self._processes:  # another one's wrong setting need not wait for this one's weights
                self._check_alive(started)
            time.sleep(0.05)
        raise StackError(
            f"{name} is not serving, and has reported no step for {self._settings.start_timeout_s:.0f} s:\n"
            f"{self.log_tail(name)}"
        )

    def _check_alive(self, name: str) -> None:
        code = self._processes[name].poll()
        if code is not None:
            # Services exit with 2 for a wrong setting, a refused model or a taken port: the caller can correct it.
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


def start_process(run_dir: Path, state: StackState, name: str) -> subprocess.Popen[bytes]:
    """Starts `name` by state.commands. The gateway finds Redis, whose password no command line shows, in its
    environment; Redis's files are this user's alone.
    """
    environment = {"OUTRIDER_REDIS_URL": redis_url_of(state)} if name == "gateway" else {}
    umask = 0o077 if name == "redis" else -1
    process = spawn(run_dir, name, state.commands[name], environment, umask=umask, ends_with_us=state.in_foreground)
    state.record(name, process.pid)
    return process


def write_state(run_dir: Path, state: StackState) -> None:
    """Replaces the file atomically: other commands may read it at any moment."""
    path = run_dir / "stack.json"
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(asdict(state), indent=2))
    unfinished.replace(path)


def read_state(run_dir: Path) -> StackState | None:
    """The stack that runs from this folder, or None; removes the leftover file of a dead one.

    Raises ConfigError: it is a file, or another program's stack.json lies there.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"--run-dir: {run_dir} is a file; give the folder that `outrider up` was started with")
    path = run_dir / "stack.json"
    if not path.is_file():
        return None
    try:
        state = StackState(**json.loads(path.read_text()))
    except (ValueError, TypeError):
        raise ConfigError(f"{path} is not what `outrider up` writes; delete it, or give another --run-dir") from None
    if not any(state.runs(name) for name in state.pids):
        path.unlink()
        return None
    return state


def stop_running(run_dir: Path, progress: Progress) -> bool:
    """Stops a stack that another command started; False if there is none."""
    state = read_state(run_dir)
    if state is None:
        return False
    if SUPERVISOR in state.pids:  # first: it would start the others again, and it may just have done so
        terminate(state.pids[SUPERVISOR], state.identities.get(SUPERVISOR, ""), _SUPERVISOR_GRACE_S)
        state = read_state(run_dir) or StackState()
    _stop_all(state, progress)
    (run_dir / "stack.json").unlink(missing_ok=True)
    return True


def dead_processes(state: StackState) -> list[str]:
    return [name for name in state.pids if not state.runs(name)]


def find_redis(progress: Progress) -> str:
    """Path of redis-server; installs it with apt where possible. Raises ConfigError that says how to get it."""
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
        "macOS: brew install redis) or give a running one with --redis-url redis://host:6379/0"
    )


def free_port() -> int:
    """A port of 127.0.0.1 that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _stop_all(state: StackState, progress: Progress) -> None:
    for name, pid in reversed(state.pids.items()):
        if pid != os.getpid():  # a supervisor in the foreground
            terminate(pid, state.identities.get(name, ""), _TERM_GRACE_S)
            progress(f"{name} stopped")
