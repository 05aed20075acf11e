"""What stands between the training loop and a method: a batch of tokens and the frozen target's view of it go in, one
loss and acceptance estimates come out.

Indices, everywhere in this package: a row is x[0:T]. The target's logits at t are its law of x[t+1]. A head that
stands on the hidden state of position t knows x[0:t+2] (the target has sampled x[t+1] from that state), so its draft of
depth d (from 0) is a guess at x[t+2+d], and what it should say is the target's logits at t+1+d.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn


@dataclass(frozen=True)
class Batch:
    """Rows to train on: `token_ids` int64[B, T]; `counts` bool[B, T], true at tokens that are to be drafted well.

    False where the row is padding or (unless wished) the prompt's.
    """

    token_ids: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class TargetView:
    """The frozen target over a batch: `features` [B, T, num_layers*H] in the order asked for, `logits` [B, T, V]."""

    features: torch.Tensor
    logits: torch.Tensor


@dataclass(frozen=True)
class DraftScores:
    """Sums over the counted positions, per depth, each float32[D], no gradient.

    `agreement`: the two argmaxes are one token (what greedy acceptance counts); `overlap`: sum over tokens of
    min(target, draft), one minus total variation (what rejection sampling accepts at temperature 1).
    """

    agreement: torch.Tensor
    overlap: torch.Tensor
    num_positions: torch.Tensor

    def __add__(self, other: DraftScores) -> DraftScores:
        return DraftScores(
            self.agreement + other.agreement,
            self.overlap + other.overlap,
            self.num_positions + other.num_positions,
        )

    def means(self) -> dict[str, list[float]]:
        """Per depth; 0 where nothing was counted."""
        counts = self.num_positions.clamp(min=1)
        return {
            "agreement": [round(float(value), 5) for value in self.agreement / counts],
            "overlap": [round(float(value), 5) for value in self.overlap / counts],
        }


class Objective(nn.Module):
    """A head and its loss. Its parameters are the head's; the target's tensors are not among them."""

    head: nn.Module
    # Target hidden layers that `forward` wants, HF numbering: num_layers is the final norm's output.
    feature_layers: tuple[int, ...] = ()

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        """(loss, a scalar in nats per counted position, weighted over depths; estimates).

        All randomness comes from `noise`. In eval mode the draft is what it would be in service: no noise.
        """
        raise NotImplementedError

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        """Write the head to the folder `out` in its public layout, which may name the target."""
        raise NotImplementedError
