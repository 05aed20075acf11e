"""transformers' report of a checkpoint is a record of our log; no handler of its own writes it to standard error."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[3]
LOAD = """
import sys
from outrider.engine.model.load import load_model
from outrider.shared.telemetry import setup_logging
setup_logging("x", "warning")
load_model(sys.argv[1], device="cpu")
"""


def test_the_load_report_is_a_record(tmp_path: Path) -> None:
    folder = tmp_path / "draft"
    shutil.copytree(ROOT / "models" / "demo-draft", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "not_of_the_model.weight": torch.zeros(2)}, folder / "model.safetensors", {"format": "pt"})
    # With CI set, transformers leaves its records to the root logger anyway.
    environ = {name: value for name, value in os.environ.items() if name != "CI"}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(folder)], cwd=ROOT, env=environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "not_of_the_model" in done.stderr
    for line in done.stderr.splitlines():
        assert " x WARNING " in line or line.startswith("    "), line
