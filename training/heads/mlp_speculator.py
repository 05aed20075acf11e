"""The MLP speculator's objective (Wertheimer et al. 2024, arXiv 2404.19124): teacher forcing.

From the hidden state of position t, step i reads token t+1+i of the text and predicts token t+2+i. All steps have equal
weight, as in the reference; by default the label is the target's distribution, not one token.
"""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.drafting.checkpoints.export import export_mlp_speculator
from outrider.drafting.heads.mlp_speculator import MlpSpeculator, MlpSpeculatorConfig
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Batch, DraftScores, Objective, TargetView
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.scoring import DepthLosses, counted_at, shifted_rows


class MlpSpeculatorObjective(Objective):
    """Runs all steps on every position that leads to a counted token at any step."""

    head: MlpSpeculator

    def __init__(self, head: MlpSpeculator, num_target_layers: int, distil: bool = True) -> None:
        super().__init__()
        self.head, self.distil = head, distil
        self.feature_layers = (num_target_layers,)

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        num_steps, num_tokens = self.head.config.n_predict, batch.token_ids.shape[1]
        depths = [counted_at(batch.counts, 2 + depth, num_tokens - 2) for depth in range(num_steps)]
        needed = torch.stack(depths).any(0)
        batch_index, position = needed.nonzero(as_tuple=True)
        state = self.head.start(target.features[batch_index, position])
        losses = DepthLosses(self, target)
        for depth, counted in enumerate(depths):
            # Past the row's end any token is fine: no counted position reads it.
            tokens = batch.token_ids[batch_index, (position + 1 + depth).clamp(max=num_tokens - 1)]
            state = self.head.advance(state, tokens, depth)
            losses.add(
                state[counted[needed]],
                self.head.output_head(depth),
                counted,
                1 + depth,
                weight=1.0 if self.distil else 0.0,
                labels=None if self.distil else shifted_rows(batch.token_ids, 2 + depth, counted),
                label_weight=1.0,
            )
        return losses.result()

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        export_mlp_speculator(self.head, out, dtype=dtype)


def build_mlp_speculator(options: HeadOptions, target: FrozenTarget) -> MlpSpeculatorObjective:
    """Builds a new speculator; embeddings and output heads start as the target's leading principal components."""
    config = MlpSpeculatorConfig(
        vocab_size=target.vocab_size,
        emb_dim=target.hidden_size,
        inner_dim=options.inner_dim,
        n_predict=options.num_heads,
        tie_weights=options.tie_weights,
        scale_input=True,
    )
    head = MlpSpeculator(config)
    with torch.no_grad():
        for modules, source in ((head.emb, target.embedding), (head.head, target.lm_head)):
            for parameter in modules.parameters():
                parameter.copy_(principal_components(source, parameter))
    return MlpSpeculatorObjective(head, target.num_layers, options.distil)


def principal_components(source: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Projects `source` [V, H] on its leading components, to the width and scale of `like` [V, width]."""
    rows, width = source.float(), like.shape[1]
    _, _, components = torch.linalg.svd(rows - rows.mean(dim=0), full_matrices=False)
    if width > len(components):
        return like
    projected = rows @ components[:width].T
    scaled: torch.Tensor = projected * (like.std() / projected.std())
    return scaled
