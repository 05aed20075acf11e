"""`outrider train auto` as it is typed, on the tiny target of this repository: stopped, repeated, measured."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from outrider.drafting.checkpoints.recognise import recognise

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[3]
# Small and few, so that it takes a minute: most of it are the starts of stacks.
OPTIONS = ("--hours", "0.012", "--max-tokens", "32")


def test_from_a_model_to_a_measured_head(tmp_path: Path) -> None:
    output = tmp_path / "run"
    command = [sys.executable, "-m", "outrider.training", "auto", "models/demo-target", "--output", str(output)]
    environment = {**os.environ, "COLUMNS": "200", "OMP_NUM_THREADS": "1", "OUTRIDER_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, *OPTIONS], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 240
    data = output / "data.jsonl"
    while not data.exists() or data.read_bytes().count(b"\n") < 4:
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "repeat the command to continue from here" in told
    before = data.read_bytes()
    command = [*command, *OPTIONS, "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert data.read_bytes().startswith(before), "what was written is gone on with"
    assert "are already present" in done.stderr
    assert "for comparison: " in done.stderr, "it says beforehand what to expect"
    assert "   tokens a round " in done.stderr
    head = Path(result["model"])
    assert (head, recognise(head)) == (output / "model", "eagle3")
    assert result["rates"].keys() == {"off", "1", "2", "3", "5"}
    assert result["pays"] == (result["with_head"] >= 1.05 * result["plain"])
    assert result["serve"].startswith("outrider serve models/demo-target")
    held_out = {json.loads(row)["id"] for row in (output / "held-out.jsonl").read_text().splitlines()}
    assert held_out
    questions = [json.loads(row)["messages"] for row in (output / "held-out.jsonl").read_text().splitlines()]
    assert not [row for row in data.read_text().splitlines() if json.loads(row)["messages"] in questions]
