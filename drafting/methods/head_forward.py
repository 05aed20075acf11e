"""One step of chains over an EAGLE head: each row takes a draft token and the head's previous feature."""

from __future__ import annotations

import torch

from outrider.drafting.methods.paged_head import PagedHead
from outrider.drafting.vocabulary.target_vocabulary import TargetVocabulary
from outrider.engine.attention.batch import ForwardBatch


class HeadForward:
    """engine.sampling.chains.ChainForward over a head; its features [R, H] are carried from row to row."""

    def __init__(self, paged_head: PagedHead, vocabulary: TargetVocabulary, *, graphs: bool) -> None:
        """graphs: steps run as CUDA graphs where the device has them."""
        decoder = paged_head.head.config.decoder  # type: ignore[attr-defined]
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
