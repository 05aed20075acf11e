"""Training-time test (Li et al. 2025, arXiv 2503.01840): a head is trained on its own output, as in service.

Step 0 reads the target's features, step k the head's own output of step k-1. Every step is matched to the target's
distribution by soft cross-entropy with weight 0.8^k.
"""

from __future__ import annotations

import torch

from outrider.drafting.heads.eagle3 import Eagle3Head
from outrider.drafting.heads.mtp import MtpHead
from outrider.training.heads.interface import Batch, DraftScores, Objective, TargetView
from outrider.training.heads.scoring import DEPTH_DECAY, DepthLosses, counted_at
from outrider.training.heads.unroll import EVAL_DEPTHS, unroll


class TrainingTimeTest(Objective):
    """Trains `ttt_steps` steps; eval mode runs at least EVAL_DEPTHS."""

    head: Eagle3Head | MtpHead
    ttt_steps: int

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        features = self.head.fuse(target.features)
        losses = DepthLosses(self, target, self.head.target_ids, batch.token_ids)
        num_positions = batch.token_ids.shape[1] - 2
        num_steps = self.ttt_steps if self.training else max(self.ttt_steps, EVAL_DEPTHS)
        for depth, predicted in enumerate(unroll(self.head, batch.token_ids, features, num_steps)):
            counted = counted_at(batch.counts, 2 + depth, num_positions)
            losses.add(predicted[counted], self.head.logits, counted, 1 + depth, DEPTH_DECAY**depth)
        return losses.result()
