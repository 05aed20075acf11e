"""act(gate) * up in plain torch, rounded as in transformers' MLPs: the oracle."""

from __future__ import annotations

import torch

ACTIVATIONS = ("silu", "gelu_tanh")


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """gate and up [T, I]; returns [T, I]. activation: one of ACTIVATIONS."""
    if activation == "silu":
        activated = torch.nn.functional.silu(gate.double())
    else:
        activated = torch.nn.functional.gelu(gate.double(), approximate="tanh")
    return activated.to(gate.dtype) * up
