"""The interface between training loop and method.

A batch of tokens and the frozen target's view of it go in, a loss and acceptance estimates come out.

Indices in this package: a row is x[0:T]. The target's logits at t predict x[t+1]. A head that reads the hidden state of
position t knows x[0:t+2] (the target has sampled x[t+1] from that state), so its draft token of depth d (from 0)
predicts x[t+2+d], and its label is the target's logits at t+1+d.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

# bytes; most that arrays of [positions, vocabulary] take together; chosen: 113 positions at a vocabulary of 262,144,
# enough for dense matrix products, and a single slice for the demo heads
SLICE_BYTES = 1 << 30
# Maps hidden states [N, H] -> logits [N, vocab].
ReadOut = Callable[[torch.Tensor], torch.Tensor]


class TargetReadOut(Protocol):
    """Maps hidden states [N, H] -> logits [N, vocab], or those of the tokens int64[V] alone: [N, V]."""

    def __call__(self, hidden: torch.Tensor, token_ids: torch.Tensor | None = None, /) -> torch.Tensor: ...


@dataclass(frozen=True)
class Batch:
    """Rows to train on: `token_ids` int64[B, T]; `counts` bool[B, T], true at tokens that count as labels.

    False for padding and (unless requested) for prompts. `rows` [B, T, L*H]: recorded hidden states of
    `row_layers`, of which the last is the final norm's output; None: the target is run.
    """

    token_ids: torch.Tensor
    counts: torch.Tensor
    rows: torch.Tensor | None = None
    row_layers: tuple[int, ...] = ()

    @classmethod
    def padded(cls, texts: Sequence[torch.Tensor], first_counted: Sequence[int]) -> Batch:
        """Returns texts int64[T] as one batch, padded on the right with id 0; each counts from `first_counted` on."""
        token_ids = pad_sequence(list(texts), batch_first=True)
        positions = torch.arange(token_ids.shape[1])
        firsts, ends = torch.tensor(first_counted)[:, None], torch.tensor([len(text) for text in texts])[:, None]
        return cls(token_ids, (firsts <= positions) & (positions < ends))

    def part(self, rows: slice, device: torch.device | str) -> Batch:
        """Returns some of its rows, on a device."""
        recorded = None if self.rows is None else self.rows[rows].to(device)
        return Batch(self.token_ids[rows].to(device), self.counts[rows].to(device), recorded, self.row_layers)


@dataclass(frozen=True)
class TargetView:
    """The frozen target on a batch: `features` [B, T, num_layers*H] in the requested order, and logits on demand.

    `read_out` turns rows of `final` [B, T, H], the final norm's output, into logits: for all rows together they may
    need more memory than the rest of a step.
    """

    features: torch.Tensor
    final: torch.Tensor
    read_out: TargetReadOut
    vocab_size: int


@dataclass(frozen=True)
class DraftScores:
    """Sums over the counted positions, per depth, each float32[D], without gradient.

    agreement: both argmaxes are the same token (greedy acceptance). overlap: sum over tokens of min(target, draft), one
    minus total variation (acceptance of rejection sampling at temperature 1).
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
        """Returns the means per depth; 0 where nothing was counted."""
        counts = self.num_positions.clamp(min=1)
        return {
            "agreement": [round(float(value), 5) for value in self.agreement / counts],
            "overlap": [round(float(value), 5) for value in self.overlap / counts],
        }


class Objective(nn.Module):
    """A head and its loss. Its parameters are the head's, without the target's tensors."""

    head: nn.Module
    # Target hidden layers that `forward` needs, in HF numbering: num_layers is the final norm's output.
    feature_layers: tuple[int, ...] = ()
    # Name in LOSSES (scoring.py) of the loss that matches a draft's distribution to the target's.
    loss: str = "cross_entropy"
    # Most that arrays of [positions, vocabulary] take together in a step (sliced_loss.py).
    slice_bytes: int = SLICE_BYTES

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        """Computes the loss and the estimates.

        The loss is a scalar in nats per counted position, weighted over depths. All randomness comes from `noise`. Eval
        mode drafts as in service, without noise.
        """
        raise NotImplementedError

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        """Writes the head to the folder `out` in its public layout, which may name the target."""
        raise NotImplementedError
