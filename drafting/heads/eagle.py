"""The EAGLE-1 head, also used by EAGLE-2 (Li et al. 2024, arXiv:2401.15077; trees: arXiv:2406.16858).

    next_feature_t = layers(fc([embedding(token_{t+1}); feature_t])),   logits of token t + 2 = lm_head(next_feature_t)
The feature is the target's last hidden state after the final norm, the input of its output head. Only Mistral's heads
have a norm before the first layer and after the last one. Not here: EAGLE-3 (eagle3.py), checkpoints, drafting
(drafting.methods).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.drafting.heads.decoder import DecoderConfig, Float32RotaryEmbedding, build_layer, causal_mask, rms_norm
from outrider.drafting.heads.errors import require_positive
from outrider.drafting.heads.frozen import build_embedding, build_lm_head
from outrider.drafting.heads.last_state import LastStateHead


@dataclass(frozen=True)
class EagleConfig:
    """The config of an EAGLE-1 head. num_target_layers: the target's; the head's own is decoder.num_hidden_layers."""

    decoder: DecoderConfig
    num_target_layers: int
    fc_bias: bool = True  # the reference's default
    has_embedding: bool = False  # an embedding of its own instead of the target's
    has_lm_head: bool = False  # an output head of its own instead of the target's
    has_norms: bool = False  # a norm before the first layer and one after the last

    def __post_init__(self) -> None:
        require_positive("eagle", num_target_layers=self.num_target_layers)


class EagleHead(LastStateHead):
    """The EAGLE-1 head.

    State dict: `fc.{weight,bias}`, `layers.{i}.*`, and the head's own `embed_tokens.weight`, `lm_head.weight` and
    `norm.weight`.

    embedding, lm_head: the target's, [vocab_size, hidden_size] each. If the config gives the head none of its own, they
    are used frozen and outside the state dict; else they initialise its own.
    attn_implementation: "eager", "sdpa", or a name registered with transformers.
    Raises HeadConfigError.
    """

    config: EagleConfig

    def __init__(
        self,
        config: EagleConfig,
        *,
        embedding: torch.Tensor | None = None,
        lm_head: torch.Tensor | None = None,
        attn_implementation: str = "sdpa",
    ) -> None:
        super().__init__()
        decoder = config.decoder
        self.config = config
        self.hf_config = decoder.to_transformers(attn_implementation)
        shape = (decoder.vocab_size, decoder.hidden_size)
        self.embed_tokens = build_embedding("eagle", shape, has_own=config.has_embedding, target=embedding)
        self.fc = nn.Linear(2 * decoder.hidden_size, decoder.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(
            [build_layer(decoder, self.hf_config, index) for index in range(decoder.num_hidden_layers)]
        )
        self.norm: nn.Module = nn.Identity()
        if config.has_norms:
            self.norm = rms_norm(decoder.hidden_size, decoder.rms_norm_eps)
        else:
            self.layers[0].input_layernorm = nn.Identity()
        self.rotary_emb = Float32RotaryEmbedding(self.hf_config)
        self.lm_head = build_lm_head("eagle", shape, has_own=config.has_lm_head, target=lm_head)

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        """Maps token_ids, position_ids int64 [B, T], features [B, T, H] -> next features [B, T, H].

        Row i pairs a position's feature with the token after it, as given. attention_mask [B or 1, 1, T, S] is added to
        the scores (boolean for "sdpa" only); None means causal. attention_kwargs are passed to the attention function.
        """
        embeddings = self.embed_tokens(token_ids)
        features = features.to(embeddings.dtype)
        hidden_states: torch.Tensor = self.fc(torch.cat((embeddings, features), dim=-1))
        position_embeddings = self.rotary_emb(hidden_states, position_ids)
        mask = causal_mask(self.hf_config, hidden_states, attention_mask)
        for layer in self.layers:
            hidden_states = layer(
                hidden_states,
                attention_mask=mask,
                position_ids=position_ids,
                position_embeddings=position_embeddings,
                **attention_kwargs,
            )
        return self.norm(hidden_states)  # type: ignore[no-any-return]

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Maps features [..., H] from forward -> logits [..., V] of the token after the next."""
        return self.lm_head(features)  # type: ignore[no-any-return]
