"""Optimizers and learning-rate schedules: Muon for the matrices inside the layers, AdamW for the rest.

Muon (Jordan 2024, as `torch.optim.Muon`) orthogonalizes each matrix's momentum; small language models need clearly
fewer steps with it. It is defined for hidden matrices only, so embeddings and norms use AdamW.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Schedule:
    """Warm-up, stable, linear decay (WSD): the decay may start at any step, so a run can be shortened."""

    warmup_steps: int
    decay_from: int
    total_steps: int

    def factor(self, step: int) -> float:
        """Returns the multiplier of the base learning rates at `step`, in (0, 1]."""
        warm = min(1.0, (step + 1) / max(1, self.warmup_steps))
        decay_steps = max(1, self.total_steps - self.decay_from)
        return warm * min(1.0, max(0.02, (self.total_steps - step) / decay_steps))


@dataclass(frozen=True)
class CosineSchedule:
    """Linear warm-up, then half a cosine down to `last_factor` at the last step."""

    warmup_steps: int
    total_steps: int
    last_factor: float = 0.02

    def factor(self, step: int) -> float:
        """Returns the multiplier of the base learning rates at `step`, in (0, 1]."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        share = (step - self.warmup_steps) / max(1, self.total_steps - 1 - self.warmup_steps)
        return self.last_factor + (1.0 - self.last_factor) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, share)))


class ScheduledOptimizer:
    """Runs several optimizers as one; the caller's schedule sets the learning rates before every step."""

    def __init__(self, optimizers: list[torch.optim.Optimizer], base_lrs: list[float]) -> None:
        self.optimizers, self._base_lrs = optimizers, base_lrs

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


class HybridOptimizer(ScheduledOptimizer):
    """Uses Muon for the matrices inside the layers, AdamW for the rest; a model needs some of both."""

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float, weight_decay: float) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        hidden = [parameter for name, parameter in named if is_inside_layer(name, parameter)]
        rest = [parameter for name, parameter in named if not is_inside_layer(name, parameter)]
        muon = torch.optim.Muon(hidden, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
        super().__init__([muon, adamw], [muon_lr, adamw_lr])


def is_inside_layer(name: str, parameter: torch.Tensor) -> bool:
    """Returns whether the parameter uses Muon."""
    return parameter.ndim == 2 and ".layers." in name


def scheduled_adamw(model: nn.Module, lr: float, weight_decay: float) -> ScheduledOptimizer:
    """Builds AdamW on everything trainable; norms and biases do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return ScheduledOptimizer([torch.optim.AdamW(filled, lr=lr, betas=(0.9, 0.95))], [lr])
