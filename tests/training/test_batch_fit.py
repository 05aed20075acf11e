"""Without a given batch size a batch is what fits; a step has the same windows, a resumed run the same batches."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from outrider.training import batch_fit, train
from outrider.training.batch_fit import fitted, window_bytes
from outrider.training.data.head_data import load_windows
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.errors import CheckpointError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.head_trainer import make_accelerator
from outrider.training.heads.interface import Objective
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.registry import build_objective
from outrider.training.progress import Progress
from outrider.training.run_config import OptimizationConfig, RunConfig
from outrider.training.train import run
from tests.training.tiny import VOCAB_SIZE, write_rows, write_target

GIB = 2**30


@pytest.fixture(scope="module")
def work_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fit")
    write_target(folder / "target")
    write_rows(folder / "data.npy", length=48)
    return folder


def measured(work_dir: Path, ttt_steps: int, seq_len: int) -> tuple[int, Objective]:
    target = FrozenTarget(work_dir / "target")
    windows = load_windows([work_dir / "data.npy"], RowEncoder(work_dir), VOCAB_SIZE, seq_len)
    counts = windows.token_counts(VOCAB_SIZE)
    objective = build_objective("eagle3", HeadOptions(ttt_steps=ttt_steps), target, counts, seed=1)
    accelerator = make_accelerator(OptimizationConfig(), "cpu")
    taken = window_bytes(
        objective, lambda batch: target.view(batch.token_ids, objective.feature_layers), windows, accelerator
    )
    return taken, objective


def test_a_window_takes_more_the_longer_it_is_and_the_more_steps_are_unrolled(work_dir: Path) -> None:
    taken = {case: measured(work_dir, *case)[0] for case in ((2, 24), (2, 48), (4, 24))}
    # Rows of width 32 alone: the features of three layers, and some rows of each step.
    assert taken[2, 24] > 24 * 32 * 4 * (3 + 2)
    # Attention's share grows with the square of the length, the rest with the length.
    assert 2 * taken[2, 24] * 0.95 < taken[2, 48] < 4 * taken[2, 24]
    assert 1.3 * taken[2, 24] < taken[4, 24] < 3 * taken[2, 24]


@pytest.mark.parametrize(
    ("free_gib", "num_processes", "batch_size", "accumulation"),
    [(100, 1, 8, 2), (8, 1, 4, 4), (5.5, 1, 2, 8), (0.1, 1, 1, 16), (8, 2, 8, 2), (0.1, 2, 2, 8), (0.1, 8, 8, 2)],
)
def test_a_batch_is_halved_until_it_fits(
    work_dir: Path, free_gib: float, num_processes: int, batch_size: int, accumulation: int
) -> None:
    """A window takes a GiB here: of 8 GiB 0.8 times as much may be filled, of which one is for slices."""
    objective = measured(work_dir, 1, 24)[1]
    config = OptimizationConfig(batch_size=8, accumulation=2)
    found, line = fitted(config, objective, GIB, int(free_gib * GIB), num_processes)
    assert found == replace(config, batch_size=batch_size, accumulation=accumulation)
    assert f"batches of {batch_size} windows, {accumulation} a step: a window takes 1.00 GiB" in line


def test_a_run_fits_its_batches_and_keeps_them(work_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    config = RunConfig(
        method="eagle3",
        target=work_dir / "target",
        data=(work_dir / "data.npy",),
        output=tmp_path / "run",
        optimization=OptimizationConfig(steps=2, batch_size=8, warmup_steps=1),
        head=HeadOptions(ttt_steps=2),
        seq_len=48,
        fit_batch=True,
    )

    def run_with(free: int | None, **changes: object) -> dict[str, int]:
        monkeypatch.setattr(train, "free_bytes", lambda _accelerator: free)
        run(replace(config, **changes), Progress(Console(file=said, width=200), "steps"))  # type: ignore[arg-type]
        settings = json.loads((config.output / "run.json").read_text())["optimization"]
        return {name: settings[name] for name in ("batch_size", "accumulation")}

    assert run_with(0) == {"batch_size": 1, "accumulation": 8}
    assert "batches of 1 windows, 8 a step" in said.getvalue()
    # Resumed with more memory, or where it is unknown: the batches are the run's.
    assert run_with(64 * GIB, resume=True) == {"batch_size": 1, "accumulation": 8}
    with pytest.raises(CheckpointError, match=r"optimization.batch_size=1, this run has 8"):
        run_with(64 * GIB, resume=True, optimization=replace(config.optimization, accumulation=2))
    assert batch_fit.free_bytes(make_accelerator(config.optimization, "cpu")) is not None
