"""A multi-token prediction (MTP) layer, trained with its target and shipped in its checkpoint.

    z_t = fc([embedding_norm(embedding(token_{t+1})); hidden_norm(feature_t)])
    next_feature_t = norm(layer(z_t)),   logits of token t + 2 = lm_head(next_feature_t)
As DeepSeek-V3 (arXiv:2412.19437, section 2.2). The feature is the target's last hidden state after its final norm, and
the chained one is this layer's output after its own last norm. One layer drafts all tokens. Layer, norm and positions
are those of a one-layer model of the target's own class. Not here: checkpoints (drafting.checkpoints.mtp), drafting.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.drafting.heads.last_state import LastStateHead


@dataclass(frozen=True)
class MtpConfig:
    """The config of an MTP layer.

    decoder: transformers' config of the target's text model; the layer's own config has other layer settings.
    """

    decoder: Any
    num_target_layers: int


class MtpHead(LastStateHead):
    """An MTP layer.

    State dict: `fc.weight`, `embedding_norm.weight`, `hidden_norm.weight`, and the one-layer model's `model.*`. body:
    that model without an output head. has_norm: False for a family without a norm after the layer. embedding, lm_head:
    the target's own modules, or frozen copies of its tensors.
    """

    config: MtpConfig

    def __init__(
        self, config: MtpConfig, body: Any, *, embedding: nn.Module, lm_head: nn.Module, has_norm: bool = True
    ) -> None:
        super().__init__()
        width = config.decoder.hidden_size
        self.config = config
        norm = body.norm_f if hasattr(body, "norm_f") else body.norm  # Nemotron-H's name
        self.embedding_norm = copy.deepcopy(norm)
        self.hidden_norm = copy.deepcopy(norm)
        self.fc = nn.Linear(2 * width, width, bias=False)
        if not has_norm:
            body.norm = nn.Identity()
        body.set_input_embeddings(nn.Identity())  # the layer's input is given
        self.model = body
        self.embed_tokens = embedding
        self.lm_head = lm_head

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        """Maps token_ids, position_ids int64 [B, T], features [B, T, H] -> next features [B, T, H].

        Row i pairs a position's feature with the token after it, as given. attention_mask: as the target's model takes
        it; None means causal. attention_kwargs are passed to the attention function.
        """
        embeddings = self.embedding_norm(self.embed_tokens(token_ids))
        features = self.hidden_norm(features.to(embeddings.dtype))
        return self.model(  # type: ignore[no-any-return]
            inputs_embeds=self.fc(torch.cat((embeddings, features), dim=-1)),
            position_ids=position_ids,
            attention_mask=attention_mask,
            use_cache=False,
            **attention_kwargs,
        ).last_hidden_state

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Maps features [..., H] from forward -> logits [..., V] of the token after the next."""
        return self.lm_head(features)  # type: ignore[no-any-return]
