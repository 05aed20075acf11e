"""Parts of heads with a reduced draft vocabulary: the offsets from draft to target ids, and the layers they read."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from outrider.drafting.heads.errors import HeadConfigError, require_shape


class DraftVocabularyHead(nn.Module):
    """A head that reads hidden states of the target and scores a draft vocabulary.

    Its `config` has decoder, draft_vocab_size and feature_layers. d2t: int64 [draft_vocab_size], target id minus draft
    id; a buffer of the state dict.
    """

    config: Any
    d2t: torch.Tensor | None

    def set_draft_vocabulary(self, owner: str, d2t: torch.Tensor | None) -> None:
        """Takes the offsets. Raises HeadConfigError if a reduced vocabulary has none, or for another shape."""
        draft_vocab_size, vocab_size = self.config.draft_vocab_size, self.config.decoder.vocab_size
        if d2t is None and draft_vocab_size < vocab_size:
            sizes = f"{draft_vocab_size} of {vocab_size} tokens"
            raise HeadConfigError(f"{owner}: a head over {sizes} needs d2t", param="d2t")
        if d2t is not None:
            require_shape(owner, "d2t", d2t.shape, (draft_vocab_size,))
        self.register_buffer("d2t", d2t)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Returns the target's hidden states that it reads, in transformers' numbering."""
        layers: tuple[int, ...] = self.config.feature_layers
        return layers

    @property
    def target_ids(self) -> torch.Tensor | None:
        """Returns int64 [draft_vocab_size], the target id of each draft id; None: identical ids."""
        if self.d2t is None:
            return None
        return torch.arange(self.d2t.shape[0], device=self.d2t.device) + self.d2t
