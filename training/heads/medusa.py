"""Medusa's objective (Cai et al. 2024, arXiv 2401.10774, section 2.2.1).

Head i predicts token t+i+2 (i from 0) from the hidden state of position t, with weight 0.8^i.

By default the label is the target's distribution at that position, not its one token (self-distillation, section
2.3.2): unbiased for the same marginal distribution, with less noise.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafting.checkpoints.export import export_medusa
from outrider.drafting.checkpoints.medusa import load_medusa
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Batch, DraftScores, Objective, TargetView
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.scoring import DEPTH_DECAY, DepthLosses, counted_at, shifted_rows


class MedusaObjective(Objective):
    """Runs each head on the positions that lead to a counted token at its depth."""

    head: MedusaHeads

    def __init__(self, head: MedusaHeads, num_target_layers: int, distil: bool = True) -> None:
        super().__init__()
        self.head, self.distil = head, distil
        self.feature_layers = (num_target_layers,)
        if not distil and head.token_map is not None:
            raise ValueError("hard labels need the full vocabulary")

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        losses = DepthLosses(self, target, self.head.token_map)
        for depth, block in enumerate(self.head.blocks):
            counted = counted_at(batch.counts, 2 + depth, batch.token_ids.shape[1] - 2)
            losses.add(
                block(shifted_rows(target.features, 0, counted)),
                self.head.output_head(depth),
                counted,
                1 + depth,
                weight=DEPTH_DECAY**depth if self.distil else 0.0,
                labels=None if self.distil else shifted_rows(batch.token_ids, 2 + depth, counted),
                label_weight=DEPTH_DECAY**depth,
            )
        return losses.result()

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        export_medusa(self.head, out, target=target_name, dtype=dtype)


def build_medusa(options: HeadOptions, target: FrozenTarget) -> MedusaObjective:
    """Builds new heads: residual blocks initialised as the identity, over the target's output head or copies of it."""
    config = MedusaConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_heads=options.num_heads,
        num_layers=options.num_layers or 1,
        shares_lm_head=options.share_lm_head,
    )
    head = MedusaHeads(config, lm_head=target.lm_head if options.share_lm_head else None)
    if head.lm_heads is not None:
        with torch.no_grad():
            for parameter in head.lm_heads.parameters():
                parameter.copy_(target.lm_head)
    return MedusaObjective(head, target.num_layers, options.distil)


def load_medusa_objective(path: Path, target: TargetWeights) -> MedusaObjective:
    """Reads heads to train them further. Raises CheckpointRefused."""
    return MedusaObjective(load_medusa(path, target, torch.float32), target.num_layers)
