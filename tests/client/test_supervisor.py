"""What dies of a stack is started again: a real Redis here; the whole stack, through `outrider`, among the storms."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import redis
from command import OUTRIDER, ROOT, TIMEOUT_S, outrider

from outrider.client.stack.commands import StackSettings, StackState, gateway_command
from outrider.client.stack.own_redis import redis_url_of
from outrider.client.stack.processes import Progress, Stack, dead_processes, read_state, stop_running
from outrider.client.stack.supervisor import _Backoff, supervise
from tests.ports import server_port

BODY = {
    "model": "demo-target",
    "prompt": "class Queue:\n",
    "max_tokens": 400,
    "temperature": 0.9,
    "seed": 7,
    "ignore_eos": True,
}


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url) as client:
            return bool(client.ping())
    except redis.ConnectionError:
        return False


@contextmanager
def supervised(stack: Stack, run_dir: Path, progress: Progress = lambda _message: None) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=supervise, args=(run_dir, stack.state, progress, stop))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_killed_process_is_back_on_its_port(tmp_path: Path) -> None:
    stack = Stack(StackSettings(model="", draft_model=""), tmp_path, lambda _message: None)
    try:
        stack.state.redis_url = stack._start_redis()
        url = redis_url_of(stack.state)
        with supervised(stack, tmp_path):
            for number in (1, 2):
                killed = stack.state.pids["redis"]
                os.kill(killed, signal.SIGKILL)
                until(lambda number=number: stack.state.num_restarts.get("redis") == number, "started again")  # type: ignore[misc]
                until(lambda: answers(url), "answers on its port")
                assert stack.state.pids["redis"] != killed
        stored = read_state(tmp_path)
        assert stored == stack.state
        assert stored.pids["supervisor"] == os.getpid()
        assert dead_processes(stored) == []
    finally:
        stack.stop()
    assert not answers(url)


_STARTS_A_REDIS = """
import sys, time
from pathlib import Path
from outrider.client.stack.commands import StackSettings
from outrider.client.stack.processes import Stack, write_state
settings, foreground = StackSettings(model="", draft_model=""), sys.argv[2] == "foreground"
stack = Stack(settings, Path(sys.argv[1]), print, in_foreground=foreground)
stack.state.redis_url = stack._start_redis()
write_state(Path(sys.argv[1]), stack.state)
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is a signal on Linux alone")
@pytest.mark.parametrize("kind", ["foreground", "detached"])
def test_a_killed_command_in_the_foreground_leaves_nothing_running(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", _STARTS_A_REDIS, str(tmp_path), kind]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line == "started\n" for line in process.stdout)
        state = state_of(tmp_path)
        process.kill()
    if kind == "foreground":
        until(lambda: not state.runs("redis"), "Redis ends with the command")
        assert read_state(tmp_path) is None
    else:
        assert answers(redis_url_of(state))
        assert stop_running(tmp_path, lambda _message: None)


def test_what_cannot_be_started_or_written_down_now_is_later(tmp_path: Path) -> None:
    """As with a full disk: neither the log can be opened nor stack.json be replaced."""
    stack = Stack(StackSettings(model="", draft_model=""), tmp_path, lambda _message: None)
    said: list[str] = []
    log, unfinished = tmp_path / "redis.log", tmp_path / "stack.new"
    try:
        stack.state.redis_url = stack._start_redis()
        with supervised(stack, tmp_path, said.append):
            until(lambda: (tmp_path / "stack.json").exists(), "supervised")
            log.unlink()
            log.mkdir()
            unfinished.mkdir()
            os.kill(stack.state.pids["redis"], signal.SIGKILL)
            until(lambda: any("redis cannot be started" in message for message in said), "it is said")
            log.rmdir()
            until(lambda: answers(redis_url_of(stack.state)), "started")
            unfinished.rmdir()
            until(lambda: state_of(tmp_path).num_restarts == {"redis": 1}, "written down")
            assert dead_processes(state_of(tmp_path)) == []
    finally:
        stack.stop()


def test_a_process_that_dies_at_every_start_is_started_less_and_less_often() -> None:
    backoff = _Backoff()
    now, delays = 1000.0, []
    for _ in range(9):
        backoff.died(now)
        delays.append(backoff.delay_s)
        assert backoff.due_at == now + backoff.delay_s
        now = backoff.started_at = backoff.due_at
    assert delays == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    backoff.died(now + 61)  # it has run for a minute meanwhile
    assert backoff.delay_s == 0.5


def test_a_gateway_waits_as_long_as_its_verifier_takes_to_load() -> None:
    command = gateway_command(StackSettings("m", "", gateway_args=("--x", "y")), StackState(verifier_start_s=100.0))
    assert command[command.index("--failover-s") + 1] == "230"
    assert command[-2:] == ["--x", "y"]  # what is asked for comes last, and so counts


def test_an_operators_own_patience_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_FAILOVER_S", "7")
    assert "--failover-s" not in gateway_command(StackSettings("m", ""), StackState(verifier_start_s=100.0))


# ---- whole stacks -----------------------------------------------------------------------------------------------


def state_of(run_dir: Path) -> StackState:
    state = read_state(run_dir)
    assert state is not None
    return state


def status(run_dir: Path) -> int:
    return outrider("status", "--run-dir", str(run_dir)).returncode


def up(run_dir: Path) -> list[str]:
    return [
        *("up", "--drafters", "1", "--run-dir", str(run_dir)),
        *("--port", str(server_port()), "--grpc-port", str(server_port())),
    ]


def text_of(url: str) -> str:
    answer = httpx.post(f"{url}/v1/completions", json=BODY, timeout=TIMEOUT_S)
    text: str = answer.raise_for_status().json()["choices"][0]["text"]
    return text


def stream_over_a_death(state: StackState) -> tuple[str, list[str]]:
    """Text and comments of a stream whose only verifier is killed once it has begun."""
    text, comments = "", []
    killed = False
    with httpx.stream("POST", f"{state.url}/v1/completions", json={**BODY, "stream": True}, timeout=TIMEOUT_S) as reply:
        for line in reply.iter_lines():
            if line.startswith(":"):
                comments.append(line)
            elif line.startswith("data: {"):
                text += json.loads(line.removeprefix("data: "))["choices"][0]["text"]
                if not killed:
                    os.kill(state.pids["verifier"], signal.SIGKILL)
                    killed = True
    return text, comments


@pytest.mark.storm
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_every_kind_of_child_comes_back_detached(tmp_path: Path) -> None:
    done = outrider(*up(tmp_path), "--detach")
    assert done.returncode == 0, done.stderr
    try:
        first = state_of(tmp_path)
        text = text_of(first.url)
        for name in ("redis", "verifier", "drafter-0", "gateway"):
            os.kill(state_of(tmp_path).pids[name], signal.SIGKILL)
            until(lambda name=name: state_of(tmp_path).num_restarts.get(name) == 1, f"{name} is started")  # type: ignore[misc]
            until(lambda: status(tmp_path) == 0, f"{name} serves")
            assert text_of(first.url) == text
        last = state_of(tmp_path)
        assert (last.url, last.verifiers, last.drafters) == (first.url, first.verifiers, first.drafters)
        assert set(last.num_restarts) == {"redis", "verifier", "drafter-0", "gateway"}
        # More than once if a stranger's connection had the port while the process started.
        shown = ", ".join(f"{name} {number}" for name, number in last.num_restarts.items())
        assert f"restarts  {shown}\n" in outrider("status", "--run-dir", str(tmp_path)).stdout
    finally:
        assert outrider("down", "--run-dir", str(tmp_path)).returncode == 0
    assert len(dead_processes(last)) == len(last.pids) == 5


@pytest.mark.storm
@pytest.mark.timeout(3 * TIMEOUT_S)
def test_a_stream_goes_on_when_its_only_verifier_is_back(tmp_path: Path) -> None:
    """In the foreground, which `outrider down` ends too."""
    with subprocess.Popen([OUTRIDER, *up(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        try:
            until(lambda: (state := read_state(tmp_path)) is not None and "supervisor" in state.pids, "up")
            state = state_of(tmp_path)
            undisturbed = text_of(state.url)
            text, comments = stream_over_a_death(state)
            assert text == undisturbed
            assert set(comments) == {": waiting for a verifier"}
        finally:
            stop_running(tmp_path, lambda _message: None)
        assert process.stderr is not None
        assert "verifier died; starting it again in 0.5 s" in process.stderr.read()
        assert process.wait() == 0
    assert read_state(tmp_path) is None
