"""Exports a training run's checkpoint in its method's public layout, at any time and in any dtype.

A finished run has already been exported (OUTPUT/model); this is for a running one, or for another dtype.
Not here: the layouts (drafting.checkpoints.export). Run: `outrider train export --help`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from outrider.training.errors import CheckpointError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Objective
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.registry import build_objective
from outrider.training.run_state import latest_checkpoint, load_checkpoint, require_same, settings_of
from outrider.training.train import target_fingerprint


def export_run(run_dir: Path, target_dir: Path, out: Path, dtype: torch.dtype, target_name: str) -> int:
    """Writes the latest checkpoint of `run_dir` to `out`; returns its step. Raises CheckpointError, SettingError."""
    path = latest_checkpoint(run_dir)
    state = load_checkpoint(path)
    load_objective(path, state, target_dir).export(out, dtype, target_name)
    return int(state["step"])


def load_objective(path: Path, state: dict[str, Any], target_dir: Path) -> Objective:
    """Rebuilds the head of a checkpoint's state with its objective, in eval mode, over the target of its training."""
    try:
        settings = settings_of(state)
        fields = dict(settings["head"])
        fields["feature_layers"] = tuple(fields["feature_layers"])
        fields["init"] = Path(fields["init"]) if fields["init"] else None
        options, method = HeadOptions(**fields), settings["method"]
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a checkpoint of `outrider train train`: {error!r}") from error
    require_same(path, {"target": settings["target"]}, {"target": target_fingerprint(target_dir)})
    target = FrozenTarget(target_dir, torch.float32)
    objective = build_objective(method, options, target, _counts_of(state["head"], target.vocab_size), seed=0)
    objective.head.load_state_dict(state["head"])
    return objective.eval()


def _counts_of(head: dict[str, torch.Tensor], vocab_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Returns token counts that select the same draft vocabulary again: 1 for its tokens."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    offsets = head.get("d2t")
    if offsets is not None:
        counts[(torch.arange(len(offsets)) + offsets).numpy()] = 1
    return counts
