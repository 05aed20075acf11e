"""`outrider key` as it is run: the line goes to standard output, the key to standard error, once."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

OUTRIDER = str(Path(sys.executable).with_name("outrider"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([OUTRIDER, "key", *arguments], capture_output=True, text=True, timeout=280, check=False)


def test_new() -> None:
    done = run("new", "alice", "--max-concurrent", "3", "--tokens-per-minute", "9000")
    assert done.returncode == 0
    [said] = done.stderr.splitlines()
    key = said.removeprefix("key, shown only once: ")
    assert done.stdout == f"alice:{hashlib.sha256(key.encode()).hexdigest()}:3:9000\n"
    assert run("new", "alice").stderr != done.stderr


def test_new_as_json() -> None:
    found = json.loads(run("new", "alice", "--json").stdout)
    assert found["line"] == f"alice:{hashlib.sha256(found['key'].encode()).hexdigest()}"
    assert found["name"] == "alice"


@pytest.mark.parametrize("arguments", [("new",), ("new", "a:b"), ("new", "a", "--max-concurrent", "-1"), ("old",)])
def test_wrong_usage(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
