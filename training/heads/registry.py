"""Method name -> a new objective over a new head. It has no command of its own."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from training.errors import SettingError
from training.frozen_target import FrozenTarget
from training.heads.interface import Objective
from training.heads.options import METHODS, HeadOptions


def build_objective(
    method: str, options: HeadOptions, target: FrozenTarget, token_counts: npt.NDArray[np.int64], seed: int
) -> Objective:
    """A new head with float32 weights that are a function of `seed`, on the target's device.

    `token_counts` int64[vocab]: how often each token is to be drafted. Raises SettingError for options that cannot be.
    """
    options.check(method)
    # Imported by name: a method's file need not load for another's sake.
    torch.manual_seed(seed)
    if method == "medusa":
        from training.heads.medusa import build_medusa

        objective: Objective = build_medusa(options, target)
    elif method == "mlp_speculator":
        from training.heads.mlp_speculator import build_mlp_speculator

        objective = build_mlp_speculator(options, target)
    elif method == "eagle":
        from training.heads.eagle import build_eagle

        objective = build_eagle(options, target)
    elif method == "eagle3":
        from training.heads.eagle3 import build_eagle3

        objective = build_eagle3(options, target, token_counts)
    elif method == "draft_model":
        from training.heads.draft_model import build_draft_model

        objective = build_draft_model(options, target)
    else:
        raise SettingError(f"--method {method!r}: must be one of {', '.join(METHODS)}")
    return objective.to(target.device)
