"""Servers that hang, never end, send too much or send what is no answer: each is named, and nothing is raised."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from outrider.client.audit.__main__ import main
from outrider.client.audit.run import CannotAudit, run_audit
from outrider.client.audit.session import Options
from outrider.client.audit.wire import Server
from tests.audit.fake_server import FakeServer

ROOT = Path(__file__).resolve().parents[2]
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def _hang(connection: socket.socket) -> None:
    while connection.recv(65536):  # until the client leaves
        pass


def _endless(piece: bytes) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(_HEAD + b"transfer-encoding: chunked\r\n\r\n")
        while True:
            connection.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))

    return send


def _drip(connection: socket.socket) -> None:
    connection.sendall(_HEAD + b"content-length: 1000000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


@contextmanager
def raw_server(behave: Callable[[socket.socket], None], models_too: bool = False) -> Iterator[str]:
    """Behaves so to every POST, and to GETs if `models_too`."""

    def answer(connection: socket.socket) -> None:
        with connection:
            try:
                asked = connection.recv(65536)
                if asked.startswith(b"GET") and not models_too:
                    body = b'{"data":[{"id":"model"}]}'
                    connection.sendall(_HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
                else:
                    behave(connection)
            except OSError:
                pass

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.parametrize(
    ("behave", "told"),
    [
        (_hang, "no whole answer to POST /v1/completions within 1 s"),
        (_drip, "no whole answer to POST /v1/completions within 1 s"),
        (_endless(b"data: {}\n\n" * 1000), "an answer of more than 16 MB"),
        (_endless(b"x" * 100_000), "an answer of more than 16 MB"),
    ],
    ids=["hangs", "drips", "endless stream", "endless text"],
)
def test_a_server_without_an_end_is_named_at_once(
    behave: Callable[[socket.socket], None], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with raw_server(behave) as url:
        assert main([url, "--timeout", "1"]) == 3
    assert told in capsys.readouterr().err


def test_a_server_that_hangs_from_the_first_request_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with raw_server(_hang, models_too=True) as url:
        assert main([url, "--timeout", "1"]) == 3
    assert "no whole answer to GET /v1/models within 1 s" in capsys.readouterr().err


def _one_answer(connection: socket.socket) -> None:
    connection.sendall(_HEAD + b"content-length: 2\r\n\r\n{}")
    connection.recv(65536)  # another request, which is lost with the connection


def test_a_connection_that_ends_with_an_answer_is_no_dead_server() -> None:
    with raw_server(_one_answer, models_too=True) as url, closing(Server(url)) as server:
        assert [server.get("/v1/models") for _ in range(3)] == ["{}"] * 3


class _TextAlone(FakeServer):
    """Ignores `n` and logprobs, as `transformers serve` does."""

    def respond(self, path: str, content: bytes) -> tuple[int, str, bytes]:
        body = json.loads(content) if content else {}
        kept = {name: value for name, value in body.items() if name not in ("n", "logprobs", "prompt_logprobs")}
        return super().respond(path, json.dumps(kept).encode())


def test_n_that_is_ignored_is_no_failure() -> None:
    report = run_audit(Server("http://fake", transport=_TextAlone().transport), Options(tokens=500))
    assert not report.is_broken, [finding for finding in report.findings if finding.verdict == "broken"]
    assert report.abilities["refused"]["n"] == "1 choices of 2"
    assert {finding.test for finding in report.findings if finding.verdict == "not tested"} >= {"law", "logprobs"}


class _HangsLater(FakeServer):
    def __init__(self) -> None:
        super().__init__()
        self._asked = itertools.count()

    def spoil(self, data: bytes) -> bytes:
        if next(self._asked) > 60:
            raise httpx.ReadTimeout("slow")
        return data


def test_a_hang_in_the_middle_stops_the_audit_and_keeps_what_was_found() -> None:
    report = run_audit(Server("http://fake", transport=_HangsLater().transport), Options(tokens=500))
    assert "no whole answer" in report.stopped
    assert not report.is_complete
    assert not report.is_broken
    assert any(finding.verdict == "holds" for finding in report.findings)
    assert report.findings[-1].verdict == "not tested"


# Starts Python with its arguments where Ctrl-C counts, also if the tests run with SIGINT ignored.
_WITH_CTRL_C = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_ctrl_c_does_not_wait_for_answers() -> None:
    with raw_server(_hang) as url:
        command = [sys.executable, "-c", _WITH_CTRL_C, "-m", "outrider.client.audit", url]
        process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
        assert process.stderr is not None
        assert process.stderr.readline() == b"abilities ...\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 130
        process.stderr.close()


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield from _leaves(part, (*path, key))


_GARBAGE = (None, [], {}, "", "\x1b[2J", -1, 1e308, float("nan"), 10**30, True, [[]], {"id": {}}, "0")


def _spoilt(data: bytes, rng: random.Random) -> bytes:
    """The JSON of one answer with one value replaced."""
    if data.startswith(b"data:"):
        lines = data.split(b"\n\n")
        place = rng.randrange(len(lines) - 2)
        lines[place] = b"data: " + _spoilt(lines[place][6:], rng)
        return b"\n\n".join(lines)
    value = json.loads(data)
    path = rng.choice(list(_leaves(value)))
    inside = value
    for key in path[:-1]:
        inside = inside[key]
    inside[path[-1]] = rng.choice(_GARBAGE)
    return json.dumps(value).encode()


class _Spoilt(FakeServer):
    def __init__(self, seed: int, share: float) -> None:
        super().__init__()
        self._spoil_rng, self._share, self._spoil_lock = random.Random(seed), share, threading.Lock()

    def spoil(self, data: bytes) -> bytes:
        with self._spoil_lock:
            is_json = data[:1] in (b"{", b"d")
            return _spoilt(data, self._spoil_rng) if is_json and self._spoil_rng.random() < self._share else data


def _audit_of_spoilt_answers(seed: int, share: float) -> None:
    server = Server("http://fake", transport=_Spoilt(seed, share).transport)
    with suppress(CannotAudit):
        assert run_audit(server, Options(tokens=100, greedy_tokens=12)).findings


@pytest.mark.parametrize("seed", range(3))
def test_spoilt_answers_raise_nothing(seed: int) -> None:
    _audit_of_spoilt_answers(seed, 0.02)


@pytest.mark.storm
@pytest.mark.parametrize("seed", range(40))
def test_spoilt_answers_raise_nothing_in_many_runs(seed: int) -> None:
    _audit_of_spoilt_answers(seed, random.Random(seed).choice((0.003, 0.01, 0.05)))


def test_control_characters_do_not_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    body = b"\x1b]0;owned\x07"
    with raw_server(lambda c: c.sendall(b"HTTP/1.1 400 no\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))) as url:
        assert main([url]) == 3
    told = capsys.readouterr().err
    assert "owned" in told
    assert "\x1b" not in told
