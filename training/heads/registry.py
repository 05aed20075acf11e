"""Builds an objective over a new head, by the method's name, or over a head that was trained before."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Objective
from outrider.training.heads.options import METHODS, TRAINED_FURTHER, HeadOptions

if TYPE_CHECKING:
    from outrider.drafting.checkpoints.target_weights import TargetWeights


def build_objective(
    method: str, options: HeadOptions, target: FrozenTarget, token_counts: npt.NDArray[np.int64], seed: int
) -> Objective:
    """Builds a new head on the target's device, with float32 weights that are a function of `seed`.

    token_counts int64[vocab]: how often each token is a label. With `options.init` it is that head, trained further.
    Raises SettingError for invalid options.
    """
    options.check(method)
    torch.manual_seed(seed)
    objective: Objective
    # Imported here, so that only the method's own file is loaded.
    if options.init is not None and method != "draft_model":
        objective = _build_further(method, options, options.init, target)
    elif method == "medusa":
        from outrider.training.heads.medusa import build_medusa

        objective = build_medusa(options, target)
    elif method == "mlp_speculator":
        from outrider.training.heads.mlp_speculator import build_mlp_speculator

        objective = build_mlp_speculator(options, target)
    elif method == "eagle":
        from outrider.training.heads.eagle import build_eagle

        objective = build_eagle(options, target)
    elif method == "eagle3":
        from outrider.training.heads.eagle3 import build_eagle3

        objective = build_eagle3(options, target, token_counts)
    elif method in ("dspark", "dflash"):
        from outrider.training.heads.block import build_block

        objective = build_block(method, options, target, token_counts)
    elif method == "mtp":
        from outrider.training.heads.mtp import build_mtp

        objective = build_mtp(options, target)
    elif method == "draft_model":
        from outrider.training.heads.draft_model import build_draft_model

        objective = build_draft_model(options, target)
    else:
        raise SettingError(f"--method {method!r}: must be one of {', '.join(METHODS)}")
    objective.loss = options.loss
    return objective.to(target.device)


def _build_further(method: str, options: HeadOptions, init: Path, target: FrozenTarget) -> Objective:
    """Reads the head `init`, which must be one for `method`. Raises SettingError."""
    from outrider.drafting.checkpoints.errors import CheckpointRefused
    from outrider.drafting.checkpoints.recognise import recognise
    from outrider.drafting.checkpoints.target_weights import load_target_weights
    from outrider.training.heads.training_time_test import TrainingTimeTest

    try:
        kind = recognise(init)
        if kind != method:
            raise SettingError(f"--init {init} is a draft for {kind}, not for --method {method}")
        objective = load_objective(init, load_target_weights(target.path, torch.float32))
    except CheckpointRefused as refusal:
        raise SettingError(f"--init: {refusal}") from refusal
    if options.ttt_steps and isinstance(objective, TrainingTimeTest):
        objective.ttt_steps = options.ttt_steps
    return objective


def load_objective(path: Path, target: TargetWeights) -> Objective:
    """Reads a head in any of its public layouts, with float32 weights, to train it further.

    Raises CheckpointRefused for a checkpoint that cannot be read, SettingError for a kind that cannot be trained so.
    """
    from outrider.drafting.checkpoints.recognise import recognise

    kind = recognise(path)
    if kind == "eagle3":
        from outrider.training.heads.eagle3 import load_eagle3_objective

        return load_eagle3_objective(path, target)
    if kind in ("dspark", "dflash"):
        from outrider.training.heads.block import load_block_objective

        return load_block_objective(path, target)
    if kind == "medusa":
        from outrider.training.heads.medusa import load_medusa_objective

        return load_medusa_objective(path, target)
    raise SettingError(f"{path}: a draft for {kind} cannot be trained further, only {', '.join(TRAINED_FURTHER)}")
