"""EAGLE-1's objective (Li et al. 2024, arXiv 2401.15077, section 4.2).

It regresses the target's next feature (smooth L1, weight 1) and matches the distribution that the target's output head
gives for it (soft cross-entropy, weight 0.1). Features get uniform noise of +-0.1, the paper's value; its code also
scales that by 512 / length, which is not done here. With `ttt_steps` above 1 the head is also trained on its own
features, as in HASS (Zhang et al. 2024, arXiv 2408.15766) but not in EAGLE-1.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

from outrider.drafting.checkpoints.export import export_eagle
from outrider.drafting.heads.eagle import EagleConfig, EagleHead
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Batch, DraftScores, Objective, TargetView
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.scoring import DEPTH_DECAY, DepthLosses, counted_at, shifted_rows
from outrider.training.heads.ttt_attention import TTT_ATTENTION, register_ttt_attention
from outrider.training.heads.unroll import EVAL_DEPTHS, decoder_config, unroll

FEATURE_WEIGHT = 1.0


class EagleObjective(Objective):
    """Trains `ttt_steps` steps; eval mode runs EVAL_DEPTHS."""

    head: EagleHead

    def __init__(self, head: EagleHead, options: HeadOptions) -> None:
        super().__init__()
        self.head, self._options = head, options
        self.feature_layers = head.feature_layers

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        features = self.head.fuse(target.features)
        if self.training and self._options.feature_noise > 0:
            uniform = torch.rand(features.shape, generator=noise) * 2 - 1
            features = features + (self._options.feature_noise * uniform).to(features.device, features.dtype)
        losses, num_positions = DepthLosses(self, target), batch.token_ids.shape[1] - 2
        num_steps = (self._options.ttt_steps or 1) if self.training else EVAL_DEPTHS
        for depth, predicted in enumerate(unroll(self.head, batch.token_ids, features, num_steps)):
            counted, weight = counted_at(batch.counts, 2 + depth, num_positions), DEPTH_DECAY**depth
            rows = predicted[counted]
            wanted = shifted_rows(target.features, 1 + depth, counted)
            distance = F.smooth_l1_loss(rows.float(), wanted.float(), reduction="none").mean(-1)
            losses.add_term(weight * FEATURE_WEIGHT * distance.sum() / max(1, len(distance)))
            losses.add(rows, self.head.logits, counted, 1 + depth, weight * self._options.law_weight)
        return losses.result()

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        export_eagle(self.head, out, with_embedding=self._options.save_embedding, dtype=dtype)


def build_eagle(options: HeadOptions, target: FrozenTarget) -> EagleObjective:
    """Builds a new head; the target's embedding and output head are used frozen."""
    register_ttt_attention()
    decoder = decoder_config(options, target)
    config = EagleConfig(decoder, num_target_layers=target.num_layers, fc_bias=options.fc_bias)
    # float32, since the residual stream has the embedding's dtype. The output head is the target's, unchanged.
    embedding = target.embedding.float()
    head = EagleHead(config, embedding=embedding, lm_head=target.lm_head, attn_implementation=TTT_ATTENTION)
    return EagleObjective(head, options)
