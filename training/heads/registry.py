"""Builds a new objective over a new head, by the method's name."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Objective
from outrider.training.heads.options import METHODS, HeadOptions


def build_objective(
    method: str, options: HeadOptions, target: FrozenTarget, token_counts: npt.NDArray[np.int64], seed: int
) -> Objective:
    """Builds a new head on the target's device, with float32 weights that are a function of `seed`.

    token_counts int64[vocab]: how often each token is a label. Raises SettingError for invalid options.
    """
    options.check(method)
    # Imported here, so that only the method's own file is loaded.
    torch.manual_seed(seed)
    if method == "medusa":
        from outrider.training.heads.medusa import build_medusa

        objective: Objective = build_medusa(options, target)
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
