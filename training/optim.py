"""Optimizers and learning-rate schedule: Muon for the matrices inside the layers, AdamW for the rest.

Muon (Jordan 2024, as `torch.optim.Muon`) orthogonalizes each matrix's momentum; small language models need clearly
fewer steps with it. It is defined for hidden matrices only, so embeddings and norms go to AdamW.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable, linear decay (WSD): any step may become the start of the tail, so a run can be cut short."""

    warmup_steps: int
    decay_from: int
    total_steps: int

    def factor(self, step: int) -> float:
        """What the base learning rates are multiplied by at `step`, in (0, 1]."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        decay_steps = max(1, self.total_steps - self.decay_from)
        return warm * min(1.0, max(0.02, (self.total_steps - step) / decay_steps))


class HybridOptimizer:
    """Muon and AdamW behind one `step`; learning rates are set by the caller's schedule before every step."""

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float, weight_decay: float) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        hidden = [parameter for name, parameter in named if parameter.ndim == 2 and ".layers." in name]
        rest = [parameter for name, parameter in named if not (parameter.ndim == 2 and ".layers." in name)]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(hidden, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self._base_lrs = [muon_lr, adamw_lr]

    def step(self, lr_factor: float) -> None:
        for optimizer, base_lr in zip(self.optimizers, self._base_lrs, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base_lr * lr_factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

    def state_dict(self) -> list[dict[str, object]]:
        return [optimizer.state_dict() for optimizer in self.optimizers]

    def load_state_dict(self, states: list[dict[str, object]]) -> None:
        for optimizer, state in zip(self.optimizers, states, strict=True):
            optimizer.load_state_dict(state)
