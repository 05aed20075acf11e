"""Forwards of chains over an EAGLE head: each row takes a draft token and the head's previous feature."""

from __future__ import annotations

from typing import Any

import torch

from outrider.drafting.paged.paged_head import PagedHead
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.attention.batch import ForwardBatch
from outrider.engine.run.cpu_graphs import most_rows_per_session, most_threads
from outrider.engine.sampling.cpu_chains import CpuChains


class HeadForward:
    """Implements engine.sampling.chains.ChainForward over a head; its features [R, H] are carried from row to row."""

    def __init__(self, paged_head: PagedHead, vocabulary: TargetVocabulary, *, graphs: bool) -> None:
        """Takes the head. graphs: steps run as CUDA graphs where the device has them."""
        decoder = paged_head.head.config.decoder
        self._paged = paged_head
        self._vocabulary = vocabulary
        self.device = paged_head.device
        self.block_size = paged_head.blocks.block_size
        self.uses_graphs = graphs and self.device.type == "cuda"
        self.carried_width: int = decoder.hidden_size
        self.carried_dtype = paged_head.dtype

    def forward(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self._paged.compute(batch, carried)
        return self._vocabulary.spread(self._paged.head.logits(features)), features


class _HeadPass:
    """Implements engine.sampling.cpu_chains.ChainPass; the committed rows' input is the target's hidden states."""

    def __init__(self, paged_head: PagedHead) -> None:
        self._paged = paged_head

    def first(self, batch: ForwardBatch, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self._paged.compute(batch, self._paged.head.fuse(given)).index_select(0, batch.logits_rows)
        return self._paged.head.logits(features), features

    def step(self, batch: ForwardBatch, carried: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self._paged.compute(batch, carried)
        return self._paged.head.logits(features), features


def recorded_chains(paged: PagedHead) -> CpuChains:
    """Makes the chains of a head whose forwards are recorded (PagedHead.is_recordable)."""
    head: Any = paged.head
    hidden_size = getattr(head.config, "target_hidden_size", head.config.decoder.hidden_size)
    return CpuChains(
        _HeadPass(paged),
        given_like=torch.zeros(len(head.feature_layers) * hidden_size, dtype=paged.dtype),
        target_ids=getattr(head, "target_ids", None),
        block_size=paged.blocks.block_size,
        table_width=paged.table_width,
        most_rows_per_session=most_rows_per_session(paged.layer_shapes),
        num_threads=most_threads(head),
    )
