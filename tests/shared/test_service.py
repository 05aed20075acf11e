"""A service's records and exit codes: every line of its standard error begins a record or is indented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} x (DEBUG|INFO|WARNING|ERROR|CRITICAL) \S+: .")
SERVICE = """
import logging, sys, warnings
from outrider.shared.errors import ConfigError
from outrider.shared.service import run_service
from outrider.shared.telemetry import setup_logging

async def serve():
    if "interrupted" in sys.argv:
        raise KeyboardInterrupt
    if "wrong" in sys.argv:
        raise ConfigError("--port: of two\\nlines")
    log = setup_logging("x", "info")
    log.info("begins\\nand goes on")
    warnings.warn("a warning of a library")
    raise RuntimeError("a bug")

sys.exit(run_service("x", serve))
"""


@pytest.mark.parametrize(
    ("word", "exit_code", "wanted"),
    [
        ("interrupted", 130, []),
        ("wrong", 2, ["--port: of two"]),
        ("", 1, ["begins", "a warning of a library", "RuntimeError: a bug"]),
    ],
)
def test_every_line_is_of_a_record(word: str, exit_code: int, wanted: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SERVICE, word], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == exit_code, done.stderr
    assert all(words in done.stderr for words in wanted), done.stderr
    for line in done.stderr.splitlines():
        assert RECORD.match(line) or line.startswith("    "), line
