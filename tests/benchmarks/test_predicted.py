"""The measurement of predicted outputs, on a stack of its own whose verifier has no other draft method."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.storm
def test_predictions_alone_draft(tmp_path: Path) -> None:
    file = tmp_path / "shapes.py"
    file.write_text("def area_of(shape):\n    return shape.side ** 2\n")
    command = [sys.executable, "-m", "benchmarks.predicted", "--model", "models/demo-target", "--file", str(file)]
    done = subprocess.run(
        [*command, "--rename", "area_of", "surface_of", "--max-tokens", "24", "--repeat", "1"],
        cwd=ROOT, capture_output=True, text=True, timeout=600, check=True,
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.endswith(("yes", "NO"))]
    names = ("off", "auto, no prediction", "auto, the file", "auto, wrong: prose", "auto, wrong: lines reversed")
    assert [row.startswith(name) for row, name in zip(rows, names, strict=True)] == [True] * 5, done.stdout
    assert all(row.endswith("yes") for row in rows)
    *_, a_round, _ = rows[1].split()
    assert a_round == "0.00", "drafted without a prediction"
