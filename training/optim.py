"""Optimizers and learning-rate schedules: Muon for the matrices inside the layers, AdamW for the rest.

Muon (Jordan 2024, as `torch.optim.Muon`) orthogonalizes each matrix's momentum; small language models need clearly
fewer steps with it. It is defined for hidden matrices only, so embeddings and norms use AdamW.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


class Float32Muon(torch.optim.Muon):
    """torch's Muon, whose products are bfloat16's, with products of float32.

    For CPUs without products of bfloat16: a step of a matrix of 512 x 192 took 173 ms there, and takes 5 (AVX2).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("Float32Muon takes no closure")
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, parameter.grad, group)

    def _update(self, parameter: torch.Tensor, gradient: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        update = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        update = orthogonalized(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
        scale = 0.2 * math.sqrt(max(parameter.shape))  # adjust_lr_fn="match_rms_adamw"
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"] * scale)


def orthogonalized(
    matrix: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> torch.Tensor:
    """Returns the matrix with singular values near 1, by Newton-Schulz iterations in its own dtype (Jordan 2024)."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.T if is_tall else matrix
    found = found / found.norm().clamp(min=eps)
    for _ in range(num_steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.T if is_tall else found


def multiplies_bfloat16(device_type: str) -> bool:
    """Returns whether the device has instructions for bfloat16; a CPU without them is far faster in float32."""
    if device_type != "cpu":
        return True
    return any(has is True and name.endswith("bf16") for name, has in torch.cpu.get_capabilities().items())


class HybridOptimizer(ScheduledOptimizer):
    """Uses Muon for the matrices inside the layers, AdamW for the rest; a model needs some of both."""

    def __init__(self, model: nn.Module, muon_lr: float, adamw_lr: float, weight_decay: float) -> None:
        named = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        hidden = [parameter for name, parameter in named if is_inside_layer(name, parameter)]
        rest = [parameter for name, parameter in named if not is_inside_layer(name, parameter)]
        make = torch.optim.Muon if multiplies_bfloat16(next(model.parameters()).device.type) else Float32Muon
        muon = make(hidden, lr=muon_lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        adamw = torch.optim.AdamW(rest, lr=adamw_lr, betas=(0.9, 0.95), weight_decay=0.0)
        super().__init__([muon, adamw], [muon_lr, adamw_lr])


def is_inside_layer(name: str, parameter: torch.Tensor) -> bool:
    """Returns whether the parameter uses Muon."""
    return parameter.ndim == 2 and ".layers." in name


def has_matrices_inside_layers(model: nn.Module) -> bool:
    """Returns whether anything trainable uses Muon; without, HybridOptimizer cannot be built."""
    return any(is_inside_layer(name, each) for name, each in model.named_parameters() if each.requires_grad)


def scheduled_adamw(model: nn.Module, lr: float, weight_decay: float) -> ScheduledOptimizer:
    """Builds AdamW on everything trainable; norms and biases do not decay."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if parameter.ndim >= 2], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trained if parameter.ndim < 2], "weight_decay": 0.0},
    ]
    filled = [group for group in groups if group["params"]]
    return ScheduledOptimizer([torch.optim.AdamW(filled, lr=lr, betas=(0.9, 0.95))], [lr])
