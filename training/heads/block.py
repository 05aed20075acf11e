"""The objective of one-pass block heads: blocks at random anchors of each row (DFlash, arXiv 2602.06036; DSpark,
arXiv 2607.05147).

An anchor is a position before a counted token, as the last committed one in service: its block reads the target's
hidden states of all positions before it and itself, and each of its rows is matched to the target's distribution, with
weight exp(-depth / 4) (DSpark). The Markov head is given the text's own tokens. The embedding and the output head stay
the target's; the draft vocabulary may be restricted to the data's most frequent tokens.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from outrider.drafting.checkpoints.block import load_block
from outrider.drafting.checkpoints.export import export_block
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.heads.block import BlockConfig, BlockHead
from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.eagle3 import most_frequent
from outrider.training.heads.interface import Batch, DraftScores, Objective, ReadOut, TargetView
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.scoring import DepthLosses
from outrider.training.heads.unroll import decoder_config

# tokens; of a draft; more than that a CPU never has time to verify (places 6 and 7 of such a draft bring 0.02 tokens)
DEFAULT_BLOCK_SIZE = 5
# blocks of a row in each step; more repeat what the others have taught
NUM_ANCHORS = 18
# depths; over which a row's weight falls to 1/e: DSpark, section 4
_DECAY_DEPTHS = 4.0
# rank of the Markov head; DSpark has 256 for a vocabulary of 150,000
DEFAULT_MARKOV_RANK = 64


class BlockObjective(Objective):
    """Trains a block head; eval mode runs the blocks of all positions."""

    head: BlockHead

    def __init__(self, head: BlockHead, target_architecture: str) -> None:
        super().__init__()
        self.head, self._target_architecture = head, target_architecture
        self.feature_layers = head.feature_layers

    def forward(self, batch: Batch, target: TargetView, noise: torch.Generator) -> tuple[torch.Tensor, DraftScores]:
        head, config = self.head, self.head.config
        num_tokens, num_positions = config.max_num_draft_tokens, batch.token_ids.shape[1]
        token_ids = F.pad(batch.token_ids, (0, num_tokens))
        counts = F.pad(batch.counts, (0, num_tokens + 1))
        anchors = self._anchors(counts[:, 1 : num_positions + 1], noise)
        parts = [self._outputs(batch, target, part) for part in torch.split(anchors, NUM_ANCHORS, dim=1)]
        outputs = torch.cat(parts, dim=1)
        losses, state = DepthLosses(self, target, head.target_ids, batch.token_ids), None
        for depth in range(num_tokens):
            rows = outputs[:, :, depth + config.num_silent_rows].flatten(0, 1)
            width = rows.shape[-1]
            if head.markov_head is not None:
                memory, state = head.markov_head.memory(rows, token_ids.gather(1, anchors + depth).flatten(), state)
                rows = torch.cat((rows, memory), dim=-1)
            counted = counts.gather(1, anchors + 1 + depth)
            # Anchors ascend in each row, so its true entries are in the order of `rows`.
            where = torch.zeros_like(batch.counts).scatter_(1, anchors, counted)
            losses.add(rows[counted.flatten()], self._read_out(width), where, depth, math.exp(-depth / _DECAY_DEPTHS))
        return losses.result()

    def export(self, out: Path, dtype: torch.dtype, target_name: str) -> None:
        export_block(self.head, out, target=target_name, target_architecture=self._target_architecture, dtype=dtype)

    def _read_out(self, width: int) -> ReadOut:
        """Returns the function from outputs, and the Markov head's memories behind them, to logits."""
        head = self.head

        def read_out(rows: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = head.lm_head(rows[:, :width])
            return logits if head.markov_head is None else logits + head.markov_head.markov_w2(rows[:, width:])

        return read_out

    def _anchors(self, can_begin: torch.Tensor, noise: torch.Generator) -> torch.Tensor:
        """Returns distinct positions int64 [B, A], ascending: of `can_begin` bool [B, T] first, or all in eval mode."""
        if not self.training:
            return torch.arange(can_begin.shape[1], device=can_begin.device).expand(len(can_begin), -1)
        keys = torch.rand(can_begin.shape, generator=noise).to(can_begin.device) + can_begin
        return keys.topk(min(NUM_ANCHORS, can_begin.shape[1]), dim=1).indices.sort(dim=1).values

    def _outputs(self, batch: Batch, target: TargetView, anchors: torch.Tensor) -> torch.Tensor:
        """Runs all blocks of all rows in one forward -> normed outputs [B, A, N, H]."""
        config = self.head.config
        num_rows, (batch_size, num_anchors) = config.num_block_rows(config.max_num_draft_tokens), anchors.shape
        num_context = batch.token_ids.shape[1]
        device = anchors.device
        token_ids = anchors.new_full((batch_size, num_anchors, num_rows), config.mask_token_id)
        token_ids[:, :, 0] = batch.token_ids.gather(1, anchors)
        block_positions = (anchors[:, :, None] + torch.arange(num_rows, device=device)).flatten(1)
        context_positions = torch.arange(num_context, device=device).expand(batch_size, -1)
        sees_context = context_positions[:, None] < anchors[:, :, None].expand(-1, -1, num_rows).flatten(1)[:, :, None]
        own_block = torch.arange(num_anchors, device=device).repeat_interleave(num_rows)
        same_block = own_block[:, None] == own_block

        def attention(is_causal: bool) -> dict[str, torch.Tensor]:
            in_block = same_block.tril() if is_causal else same_block
            of_blocks = torch.cat((in_block.expand(batch_size, -1, -1), sees_context), dim=2)
            # The context's own rows come to nothing; they see themselves so that no row is without any.
            of_context = torch.eye(num_context, of_blocks.shape[2], dtype=torch.bool, device=device)
            of_context = of_context.roll(len(own_block), dims=1).expand(batch_size, -1, -1)
            return {"attention_mask": torch.cat((of_blocks, of_context), dim=1)[:, None]}

        outputs = self.head(
            token_ids.flatten(1),
            self.head.fuse(target.features),
            torch.cat((block_positions, context_positions), dim=1),
            attention,
        )
        return outputs.view(batch_size, num_anchors, num_rows, -1)  # type: ignore[no-any-return]


def build_block(
    method: str, options: HeadOptions, target: FrozenTarget, token_counts: npt.NDArray[np.int64]
) -> BlockObjective:
    """Builds a new head of method "dspark" (causal in the block, with a Markov head) or "dflash".

    A reduced draft vocabulary has the most frequent tokens by `token_counts` int64[vocab]. Raises SettingError when the
    sizes, the mask token or the feature layers do not match the target.
    """
    if options.draft_vocab_size > target.vocab_size:
        raise SettingError(f"--draft-vocab-size {options.draft_vocab_size}: the target has {target.vocab_size} tokens")
    layers = options.feature_layers or _spread_layers(target.num_layers)
    if not all(0 <= layer < target.num_layers for layer in layers):
        raise SettingError(f"--feature-layer {list(layers)}: a block head reads layers 0 to {target.num_layers - 1}")
    is_dspark = method == "dspark"
    decoder = dataclasses.replace(decoder_config(options, target), model_type="qwen3")
    draft_ids = most_frequent(token_counts, options.draft_vocab_size or target.vocab_size)
    is_reduced = len(draft_ids) < target.vocab_size
    config = BlockConfig(
        decoder,
        feature_layers=layers,
        block_size=(options.block_size or DEFAULT_BLOCK_SIZE) + (0 if is_dspark else 1),
        mask_token_id=int(token_counts.argmin()),
        causal=(is_dspark,) * decoder.num_hidden_layers,
        predicts_from_anchor=is_dspark,
        draft_vocab_size=len(draft_ids),
        markov_rank=options.markov_rank or DEFAULT_MARKOV_RANK if is_dspark else 0,
        has_lm_head=is_reduced,
    )
    head = BlockHead(
        config,
        embedding=target.embedding.float(),
        lm_head=target.lm_head.float()[draft_ids],
        d2t=draft_ids - torch.arange(len(draft_ids)) if is_reduced else None,
    )
    head.lm_head.requires_grad_(False)
    return BlockObjective(head, type(target.model).__name__)


def load_block_objective(path: Path, target: TargetWeights) -> BlockObjective:
    """Reads a head to train it further. Raises CheckpointRefused."""
    head = load_block(path, target, torch.float32, attn_implementation="sdpa")
    head.lm_head.requires_grad_(False)
    return BlockObjective(head, target.architecture)


def _spread_layers(num_layers: int) -> tuple[int, ...]:
    """Returns up to four hidden states from early to late: evenly spread ones served DFlash's authors best."""
    first, last = (2, num_layers - 3) if num_layers > 8 else (min(1, num_layers - 1), num_layers - 1)
    return tuple(sorted({round(first + place * (last - first) / 3) for place in range(4)}))
