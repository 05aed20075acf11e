"""The stack's own Redis, and whom `outrider down` signals. The whole stack is run by the tests in tests/e2e."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
import redis

from outrider.client.stack.commands import StackSettings, StackState
from outrider.client.stack.own_redis import password_of, redis_url_of
from outrider.client.stack.process_identity import _from_ps, process_identity
from outrider.client.stack.processes import Stack, StackError, stop_running, write_state
from outrider.shared.errors import ConfigError


def until_written(run_dir: Path, value: bytes) -> None:
    """What a file has been given outlives the process; Redis may put that off while the disk is slow."""
    deadline = time.monotonic() + 60
    while not any(value in path.read_bytes() for path in run_dir.glob("redis/appendonlydir/*.incr.aof")):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _client(stack: Stack) -> redis.Redis:
    """Of a Redis that the stack has started."""
    stack.state.redis_url = stack._start_redis()
    return redis.Redis.from_url(redis_url_of(stack.state))


def test_a_killed_redis_keeps_what_was_committed(tmp_path: Path) -> None:
    stack = Stack(StackSettings(model="", draft_model=""), tmp_path, lambda _message: None)
    try:
        with _client(stack) as client:
            client.set("key", "value", ex=60)
            until_written(tmp_path, b"value")
        os.kill(stack._processes["redis"].pid, signal.SIGKILL)
        stack._processes["redis"].wait()
        with _client(stack) as client:
            assert client.get("key") == b"value"
            assert 0 < client.ttl("key") <= 60
    finally:
        stack.stop()


def test_a_process_that_died_is_told_while_another_one_still_loads(tmp_path: Path) -> None:
    stack = Stack(StackSettings(model="", draft_model="", start_timeout_s=30.0), tmp_path, lambda _message: None)
    try:
        stack._spawn("verifier", [sys.executable, "-c", "import time; time.sleep(600)"])
        stack._spawn("drafter-0", [sys.executable, "-c", "raise SystemExit(2)"])
        with pytest.raises(ConfigError, match=r"^drafter-0 ended with exit code 2"):
            stack._wait_serving("verifier")
    finally:
        stack.stop()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as process:
        yield process
        process.kill()


def written(run_dir: Path, pid: int, identity: str) -> None:
    state = StackState(pids={"verifier": pid}, identities={"verifier": identity})
    (run_dir / "stack.json").write_text(json.dumps(asdict(state)))


def test_down_signals_no_process_that_got_a_recycled_pid(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """The record is of an earlier process: another start, another boot, or none known."""
    boot, start = process_identity(sleeper.pid).split()
    for identity in (f"{boot} {int(start) - 1}", f"x {start}", ""):
        written(tmp_path, sleeper.pid, identity)
        assert not stop_running(tmp_path, print)
        assert not (tmp_path / "stack.json").exists()
        assert sleeper.poll() is None


def test_down_signals_no_recycled_pid_beside_one_that_runs(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as running:
        pids = {"verifier": sleeper.pid, "gateway": running.pid}
        identities = {"verifier": "an earlier one", "gateway": process_identity(running.pid)}
        (tmp_path / "stack.json").write_text(json.dumps(asdict(StackState(pids=pids, identities=identities))))
        assert stop_running(tmp_path, lambda _message: None)
        assert process_identity(running.pid) == ""
    assert sleeper.poll() is None


def test_the_process_that_was_started_is_stopped(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    written(tmp_path, sleeper.pid, process_identity(sleeper.pid))
    assert stop_running(tmp_path, lambda _message: None)
    assert process_identity(sleeper.pid) == ""


def test_ps_tells_the_same_processes_apart(sleeper: subprocess.Popen[bytes]) -> None:
    """Where there is no /proc."""
    assert _from_ps(sleeper.pid) == _from_ps(sleeper.pid) != _from_ps(os.getpid())
    sleeper.kill()
    sleeper.wait()
    assert _from_ps(sleeper.pid) == ""


def test_a_stack_stops_no_process_after_its_own_has_been_reaped(tmp_path: Path) -> None:
    """Its pid is free from then on."""
    stack = Stack(StackSettings(model="", draft_model=""), tmp_path, lambda _message: None)
    stack._spawn("gateway", [sys.executable, "-c", ""])
    stack._processes["gateway"].wait()
    with patch("os.kill") as kill:
        stack.stop()
    kill.assert_not_called()


@pytest.mark.parametrize("text", ["{", "[]", '{"unknown": 1}'])
def test_a_broken_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "stack.json").write_text(text)
    with pytest.raises(ConfigError, match=r"stack\.json is not what `outrider up` writes"):
        stop_running(tmp_path, lambda _message: None)


def test_a_file_is_no_run_dir(tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.touch()
    with pytest.raises(ConfigError, match=r"^--run-dir: .*README\.md is a file; give the folder"):
        stop_running(path, lambda _message: None)


def test_nobody_else_reads_what_requests_said(tmp_path: Path) -> None:
    """The log was readable by all users of the machine, in Redis and in its file, and had no limit of memory."""
    stack = Stack(StackSettings(model="", draft_model=""), tmp_path, lambda _message: None)
    try:
        with _client(stack) as client:
            client.set("key", "value")
            until_written(tmp_path, b"value")
            assert int(client.config_get("maxmemory")["maxmemory"]) == 640 * 2**20  # type: ignore[index]
        with redis.Redis.from_url(stack.state.redis_url) as stranger, pytest.raises(redis.AuthenticationError):
            stranger.get("key")
        password = password_of(tmp_path / "redis" / "redis.conf")
        assert len(password) == 32
        assert password not in Path(f"/proc/{stack._processes['redis'].pid}/cmdline").read_text()
        write_state(tmp_path, stack.state)
        assert password not in (tmp_path / "stack.json").read_text()
        files = [path for path in (tmp_path / "redis").rglob("*") if path.is_file()]
        assert len(files) >= 3
        assert {path.stat().st_mode & 0o777 for path in files} == {0o600}
    finally:
        stack.stop()


def test_the_gateway_is_told_of_redis_by_its_environment(tmp_path: Path) -> None:
    settings = StackSettings(model="m", draft_model="", redis_url="redis://:secret@db/0")
    stack = Stack(settings, tmp_path, lambda _message: None)
    stack.state.redis_url = settings.redis_url
    assert not any("secret" in part for part in stack._gateway_command())


def test_a_start_may_take_long_while_it_reports_steps(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    """Each step comes just in time, and all of them take four times as long as one may."""
    log_path = tmp_path / "verifier.log"
    now = 0.0
    lines = [*(f"INFO verifier: step {number}\n" for number in range(5)), "serving on 127.0.0.1:5\n"]

    def write_next(_message: str) -> None:
        nonlocal now
        now += 80.0
        with log_path.open("a") as log_file:
            log_file.write(lines.pop(0))

    write_next("")
    stack = Stack(StackSettings(model="", draft_model="", start_timeout_s=100.0), tmp_path, write_next)
    stack._processes["verifier"] = sleeper
    stack.state.commands["verifier"] = []
    with patch("outrider.client.stack.processes.time.monotonic", lambda: now):
        assert stack._wait_serving("verifier") == "127.0.0.1:5"
    assert now > 4 * 100.0


def test_a_start_that_reports_no_further_step_fails(tmp_path: Path, sleeper: subprocess.Popen[bytes]) -> None:
    (tmp_path / "verifier.log").write_text("INFO verifier: reading weights\n")
    stack = Stack(StackSettings(model="", draft_model="", start_timeout_s=0.2), tmp_path, lambda _message: None)
    stack._processes["verifier"] = sleeper
    with pytest.raises(StackError, match="has reported no step"):
        stack._wait_serving("verifier")
