"""A training run's checkpoints, which are complete or absent, and the settings a resumed run must share with them.

A checkpoint is a folder `checkpoint-STEP` that appears by one rename, once its files are on disk; the latest two are
kept. Not here: the state's contents (head_trainer.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.training.errors import CheckpointError

_NAME = re.compile(r"checkpoint-(\d{8})")
_NUM_KEPT = 2
STATE_FILE = "state.pt"


def save_checkpoint(run_dir: Path, step: int, state: Mapping[str, Any]) -> Path:
    """Writes `state` (tensors and plain values only) as the checkpoint of `step`; deletes all but the latest two."""
    run_dir.mkdir(parents=True, exist_ok=True)
    final = run_dir / f"checkpoint-{step:08d}"
    partial = run_dir / f".{final.name}.partial"
    shutil.rmtree(partial, ignore_errors=True)  # left by a kill
    partial.mkdir()
    with (partial / STATE_FILE).open("wb") as file:
        torch.save(dict(state), file)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(partial)
    if final.exists():  # written before by the resumed run: equal by construction
        shutil.rmtree(final)
    partial.rename(final)
    _sync_folder(run_dir)
    for old in checkpoints(run_dir)[:-_NUM_KEPT]:
        shutil.rmtree(old)
    return final


def checkpoints(run_dir: Path) -> list[Path]:
    """Returns a run's complete checkpoints, oldest first."""
    if not run_dir.is_dir():
        return []
    return sorted(path for path in run_dir.iterdir() if _NAME.fullmatch(path.name))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Loads the state of a checkpoint folder, on CPU. Raises CheckpointError."""
    try:
        state: object = torch.load(path / STATE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything
        words = (str(error).splitlines() or [repr(error)])[0]
        raise CheckpointError(f"{path} cannot be read: {words}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} cannot be read: it is a {type(state).__name__}")
    return state


def latest_checkpoint(run_dir: Path) -> Path:
    """Returns the run's latest checkpoint. Raises CheckpointError when it has none."""
    found = checkpoints(run_dir)
    if not found:
        raise CheckpointError(f"{run_dir} has no checkpoint")
    return found[-1]


def settings_of(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings in a checkpoint's state. Raises KeyError, TypeError or ValueError when it has none."""
    settings: dict[str, Any] = json.loads(state["settings"])
    settings["head"].setdefault("fc_bias", "fc.bias" in state["head"])  # version 0.1 had no such option
    return settings


def require_same(path: Path, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises CheckpointError with the first setting that differs and both values; a nested one as outer.inner."""
    before, now = _flat(saved), _flat(wanted)
    for name in [*now, *before]:
        if before.get(name) != now.get(name):
            raise CheckpointError(
                f"{path} was made with {name}={before.get(name)!r}, this run has {now.get(name)!r}; "
                "use the same value, or another --output"
            )


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {prefix + name: value}
    return flat


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
