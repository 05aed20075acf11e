"""An EAGLE head over a paged cache of its own: rows in, next features out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch

from drafter_service.heads.decoder import DecoderConfig
from engine.attention import ATTENTION_NAME, AttentionOps, PagedContext, register_attention
from engine.batch import ForwardBatch, SessionRows, build_batch
from engine.block_manager import BlockManager
from engine.cpu_graphs import RecordedForwards
from engine.lean import make_lean
from engine.paged_kv import LayerShape, PagedKVCache, bytes_per_block
from engine.row_invariance import make_row_invariant


class FeatureHead(Protocol):
    """EagleHead and Eagle3Head as drafting sees them; shapes as in drafter_service.heads."""

    @property
    def feature_layers(self) -> tuple[int, ...]: ...

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor: ...

    def __call__(
        self, token_ids: torch.Tensor, features: torch.Tensor, position_ids: torch.Tensor, *, paged: PagedContext
    ) -> torch.Tensor: ...

    def logits(self, features: torch.Tensor) -> torch.Tensor: ...


class PagedHead:
    """Row i of a session pairs the feature of position i with token i + 1. Not for use from two threads at a time."""

    def __init__(
        self,
        head: FeatureHead,
        ops: AttentionOps,
        dtype: torch.dtype,
        *,
        kv_cache_bytes: int,
        block_size: int,
        device: torch.device | str = "cpu",
        graphs: bool = False,
    ) -> None:
        """The head must have been built with attn_implementation=ATTENTION_NAME; it is moved to the device, and its
        modules give way to leaner ones. graphs: few rows run as recorded forwards on the CPU.
        """
        register_attention()
        self.head = head
        self.dtype = dtype
        self.device = torch.device(device)
        self._ops = ops
        module: Any = head
        decoder = module.config.decoder
        shapes = _layer_shapes(decoder)
        num_blocks = max(1, kv_cache_bytes // bytes_per_block(shapes, block_size, dtype))
        self._cache = PagedKVCache(
            shapes, num_blocks=num_blocks, block_size=block_size, dtype=dtype, device=self.device, ops=ops
        )
        self.blocks = BlockManager(num_blocks, block_size)
        module.to(self.device)
        no_features = torch.zeros(decoder.hidden_size, dtype=dtype, device=self.device)
        lean = make_lean(
            module,
            shapes,
            ops,
            max_positions=decoder.max_position_embeddings,
            probe=lambda token_ids, position_ids, paged: head(
                token_ids, no_features.expand(*token_ids.shape, -1), position_ids, paged=paged
            ),
        )
        make_row_invariant(module, ops.row_backend)
        self._recorded: RecordedForwards | None = None
        if graphs and lean.is_whole and self.device.type == "cpu" and ops.backend == "cpu":
            self._recorded = RecordedForwards(
                self._net_forward,
                module,
                shapes,
                vocab_size=decoder.vocab_size,
                table_width=min(num_blocks, -(-decoder.max_position_embeddings // block_size)),
                carried_like=no_features,
            )

    @torch.inference_mode()
    def forward(self, rows: Sequence[SessionRows], features: torch.Tensor) -> torch.Tensor:
        """features [T, H] of all rows in order -> next features [T, H]; keys and values are written."""
        batch = build_batch(rows, self.blocks.block_size, self.device)
        if self._recorded is None:
            return self.compute(batch, features)
        # Whichever logits are asked for: what a recording gives for a row here are its features.
        every_row = torch.arange(len(features), device=self.device)
        found = self._recorded.run(dataclasses.replace(batch, logits_rows=every_row), features)
        return self.compute(batch, features) if found is None else found[0]

    @torch.inference_mode()
    def compute(self, batch: ForwardBatch, features: torch.Tensor) -> torch.Tensor:
        """`forward` of a batch that is on the device."""
        paged = PagedContext(self._ops, batch, self._cache)
        return self.head(batch.token_ids[None], features[None], batch.position_ids[None], paged=paged)[0]

    def _net_forward(
        self, batch: ForwardBatch, features: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[int, torch.Tensor]]:
        if features is None:
            raise ValueError("a head goes on from features")
        return self.compute(batch, features), {}


def _layer_shapes(decoder: DecoderConfig) -> list[LayerShape]:
    return [
        LayerShape(
            f"layers.{index}.self_attn",
            decoder.num_attention_heads,
            decoder.num_key_value_heads,
            decoder.head_dim,
            decoder.head_dim,
            sliding_window=None,
        )
        for index in range(decoder.num_hidden_layers)
    ]


__all__ = ["ATTENTION_NAME", "FeatureHead", "PagedHead"]
