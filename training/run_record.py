"""Writes a training run's records (progress line, log, checkpoints), and receives requests to stop it.

Not here: the loop (train.py), the form of a checkpoint (run_state.py).
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from outrider.training.curves import line as curves_line
from outrider.training.data.jsonl_file import JsonlFile
from outrider.training.head_trainer import StepReport
from outrider.training.progress import Progress
from outrider.training.run_state import save_checkpoint


class Interrupted(KeyboardInterrupt):
    """Raised when the run was asked to stop, and has written a checkpoint."""


class RunRecord:
    """Writes `run.json`, `train.jsonl` and checkpoints to `output`, in one process if several train.

    A log longer than the run (which was killed after its last checkpoint) is truncated to `step`.
    """

    def __init__(
        self, output: Path, settings: dict[str, Any], step: int, num_steps: int, progress: Progress, is_main: bool
    ) -> None:
        self._output, self._settings, self._progress = output, json.dumps(settings), progress
        self._log: JsonlFile | None = None
        if is_main:
            output.mkdir(parents=True, exist_ok=True)
            (output / "run.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            self._log = JsonlFile(output / "train.jsonl")
            self._log.keep_rows(sum(row["step"] <= step for row in self._log.rows))
            progress.start(num_steps, step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._log is not None:
            self._progress.stop()
            self._log.close()

    def train_row(self, step: int, row: dict[str, Any]) -> None:
        if self._log is not None:
            self._log.append({"step": step, **row})
            note = f"loss {row['loss']:.3f}  {_figures(row)}  {row['tokens_per_s']:,.0f} tokens/s"
            self._progress.advance(note, step)

    def eval_row(self, step: int, means: Mapping[str, Any]) -> None:
        if self._log is not None:
            self._log.append({"step": step, "eval": means})
            self._progress.say(f"step {step}: held out: {_figures(means)}")
            if curves := curves_line(read_log(self._output)):
                self._progress.say(curves)

    def checkpoint(self, step: int, state: Callable[[], dict[str, Any]]) -> None:
        if self._log is not None:
            save_checkpoint(self._output, step, state() | {"settings": self._settings})


def read_log(output: Path) -> list[dict[str, Any]]:
    """The rows of a run's train.jsonl: those with `loss`, and those with `eval`."""
    return [json.loads(line) for line in (output / "train.jsonl").read_text(encoding="utf-8").splitlines()]


def last_rows(output: Path) -> dict[str, Any]:
    """Returns a log's newest training row and newest held-out row (None if there is none)."""
    last: dict[str, Any] = {"train": None, "held_out": None}
    for row in read_log(output):
        last["held_out" if "eval" in row else "train"] = row
    return last


def _figures(means: Mapping[str, Any]) -> str:
    columns = {"top-1": means["agreement"], "overlap": means["overlap"]}
    return "  ".join(f"{name} {' '.join(f'{value:.2f}' for value in values)}" for name, values in columns.items())


class Meter:
    """Averages over the steps since the last log line."""

    def __init__(self) -> None:
        self._reports: list[StepReport] = []
        self._started = time.monotonic()

    def add(self, report: StepReport) -> None:
        self._reports.append(report)

    def row(self, lr: float) -> dict[str, Any]:
        scores = self._reports[0].scores
        for report in self._reports[1:]:
            scores = scores + report.scores
        num_tokens = sum(report.num_tokens for report in self._reports)
        return {
            "loss": round(sum(report.loss for report in self._reports) / len(self._reports), 5),
            "grad_norm": round(sum(report.grad_norm for report in self._reports) / len(self._reports), 4),
            "lr": lr * self._reports[-1].lr_factor,
            **scores.means(),
            "tokens_per_s": round(num_tokens / (time.monotonic() - self._started), 1),
        }


@contextmanager
def stop_requests() -> Iterator[list[int]]:
    """Yields a list that is non-empty once SIGINT or SIGTERM has arrived; a second SIGINT stops at once."""
    received: list[int] = []

    def note(signum: int, _frame: FrameType | None) -> None:
        if received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signum)

    before = {signum: signal.signal(signum, note) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
