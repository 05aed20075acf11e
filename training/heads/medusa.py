"""Medusa's objective (Cai et al. 2024, arXiv 2401.10774, section 2.2.1): head i, from the hidden state of position t,
guesses token t+i+2 (i from 0), and counts 0.8^i.

By default the label is the target's law at that place instead of the one token that stands there (self-distillation,
section 2.3.2 of the paper): an unbiased view of the same marginal law with less noise.
"""

from __future__ import annotations

from pathlib import Path

import torch

from drafter_service.checkpoints.export import export_medusa
from drafter_service.heads.medusa import MedusaConfig, MedusaHeads
from training.frozen_target import FrozenTarget
from training.heads.interface import Batch, DraftScores, Objective, TargetView
from training.heads.options import HeadOptions
from training.heads.scoring import DEPTH_DECAY, DepthLosses, counted_at, shifted_rows


class MedusaObjective(Objective):
    """Positions that lead to a counted token at any depth go through all heads at once."""

    head: MedusaHeads

    def __init__(self, head: MedusaHeads, num_target_layers: int, distil: bool = True) -> None:
        super().__init__()
        self.head, self.distil = head, distil
        self.feature_layers = (num_target_layers,)
        if not distil and head.token_map is not None:
            raise ValueError("hard labels need the full vocabulary")

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        num_positions = batch.token_ids.shape[1] - 2
        depths = [counted_at(batch.counts, 2 + depth, num_positions) for depth in range(self.head.config.num_heads)]
        needed = torch.stack(depths).any(0)
        logits = self.head(shifted_rows(target.features, 0, needed))
        losses = DepthLosses(self.training, self.head.token_map)
        for depth, counted in enumerate(depths):
            losses.add(
                logits[counted[needed], depth],
                shifted_rows(target.logits, 1 + depth, counted),
                DEPTH_DECAY**depth,
                labels=None if self.distil else shifted_rows(batch.token_ids, 2 + depth, counted),
            )
        return losses.total(), losses.scores()

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        export_medusa(self.head, out, target=target_name, dtype=dtype)


def build_medusa(options: HeadOptions, target: FrozenTarget) -> MedusaObjective:
    """New heads: residual blocks that begin as the identity, over the target's output head or copies of it."""
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
