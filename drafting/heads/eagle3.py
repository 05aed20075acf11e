"""The EAGLE-3 head (Li et al. 2025, arXiv:2503.01840, section 3), with the variants of public checkpoints.

    feature_t = fc([aux_low_t; aux_mid_t; aux_high_t])          or a feature that the head itself returned
    x_t       = attention([input_layernorm(embedding(token_{t+1})); hidden_norm(feature_t)]) + residual
    next_t    = x_t + mlp(post_attention_layernorm(x_t)),        logits of token t + 2 = lm_head(norm(next_t))
A P-EAGLE head also has `mask_hidden`, which stands for the hidden states of positions that are not there yet.
The residual is the feature before hidden_norm, or after it (norm_before_residual). Further layers are plain ones.
Not here: EAGLE-1/2 (eagle.py), checkpoints, drafting (drafting.methods).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from outrider.drafting.heads.decoder import (
    DecoderConfig,
    Float32RotaryEmbedding,
    build_layer,
    causal_mask,
    rms_norm,
)
from outrider.drafting.heads.draft_vocabulary import DraftVocabularyHead
from outrider.drafting.heads.errors import HeadConfigError, require_positive
from outrider.drafting.heads.frozen import build_embedding, build_lm_head


def default_feature_layers(num_target_layers: int) -> tuple[int, ...]:
    """Returns a target's low, middle and high hidden states, for checkpoints that name none.

    vLLM makes the same choice, in the same order.
    """
    return tuple(sorted((2, num_target_layers // 2, num_target_layers - 3)))


@dataclass(frozen=True)
class Eagle3Config:
    """The config of an EAGLE-3 head.

    feature_layers: hidden states in transformers' numbering. Sizes of 0 mean the decoder's.
    """

    decoder: DecoderConfig
    feature_layers: tuple[int, ...]
    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False  # one RMSNorm over the concatenated hidden states
    fc_norm: bool = False  # one RMSNorm for each of them
    norm_output: bool = False  # `norm` is part of the feature that is fed back
    fc_bias: bool = False
    has_fc: bool = True  # False: a single hidden state is the feature (use_aux_hidden_state: false)
    has_embedding: bool = False  # an embedding of its own instead of the target's
    has_lm_head: bool = True
    mask_token_id: int | None = None  # P-EAGLE: the token of rows whose own is not drafted yet

    def __post_init__(self) -> None:
        if self.draft_vocab_size == 0:
            object.__setattr__(self, "draft_vocab_size", self.decoder.vocab_size)
        if self.target_hidden_size == 0:
            object.__setattr__(self, "target_hidden_size", self.decoder.hidden_size)
        sizes = {"draft_vocab_size": self.draft_vocab_size, "target_hidden_size": self.target_hidden_size}
        require_positive("eagle3", **sizes, num_feature_layers=len(self.feature_layers))
        if self.draft_vocab_size > self.decoder.vocab_size:
            above = f"draft_vocab_size={self.draft_vocab_size} is above vocab_size={self.decoder.vocab_size}"
            raise HeadConfigError(f"eagle3: {above}", param="draft_vocab_size")
        if self.norm_before_fc and self.fc_norm:
            raise HeadConfigError("eagle3: norm_before_fc and fc_norm exclude each other", param="fc_norm")
        if not self.has_fc and (
            len(self.feature_layers) != 1
            or self.target_hidden_size != self.decoder.hidden_size
            or self.norm_before_fc
            or self.fc_norm
        ):
            cause = "without fc the feature is one hidden state of the head's own width, not normed"
            raise HeadConfigError(f"eagle3: {cause}", param="has_fc")
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.decoder.vocab_size:
            cause = f"mask_token_id={self.mask_token_id} is not one of {self.decoder.vocab_size} tokens"
            raise HeadConfigError(f"eagle3: {cause}", param="mask_token_id")
        if not self.has_lm_head and self.draft_vocab_size < self.decoder.vocab_size:
            raise HeadConfigError("eagle3: a reduced vocabulary needs an lm_head of its own", param="has_lm_head")


class Eagle3Layer(nn.Module):
    """The first layer: its attention reads the normed embedding concatenated with the normed feature."""

    def __init__(self, config: Eagle3Config, hf_config: Any) -> None:
        super().__init__()
        hidden_size = config.decoder.hidden_size
        plain: Any = build_layer(config.decoder, hf_config, 0, num_qkv_inputs=2 * hidden_size)
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = plain.input_layernorm
        self.hidden_norm = rms_norm(hidden_size, config.decoder.rms_norm_eps)
        self.self_attn = plain.self_attn
        self.post_attention_layernorm = plain.post_attention_layernorm
        self.mlp = plain.mlp

    def forward(self, embeddings: torch.Tensor, features: torch.Tensor, **attention_kwargs: Any) -> torch.Tensor:
        """Maps embeddings, features [B, T, H] -> [B, T, H], with the residual added."""
        normed = self.hidden_norm(features)
        residual = normed if self.norm_before_residual else features
        both = torch.cat((self.input_layernorm(embeddings), normed), dim=-1)
        hidden_states = residual + self.self_attn(hidden_states=both, **attention_kwargs)[0]
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))  # type: ignore[no-any-return]


class Eagle3Head(DraftVocabularyHead):
    """The EAGLE-3 head.

    State dict: the names of public checkpoints (`fc`, `layers.0.*`, `norm`, `lm_head`, `d2t`, ...).
    embedding [vocab_size, hidden_size], lm_head [draft_vocab_size, hidden_size]: the target's. If the config gives the
    head none of its own, they are used frozen and outside the state dict; else they initialise its own.
    d2t: int64 [draft_vocab_size], target id minus draft id; needed for a reduced draft vocabulary.
    attn_implementation: "eager", "sdpa", or a name registered with transformers. Raises HeadConfigError.
    """

    config: Eagle3Config

    def __init__(
        self,
        config: Eagle3Config,
        *,
        embedding: torch.Tensor | None = None,
        lm_head: torch.Tensor | None = None,
        d2t: torch.Tensor | None = None,
        attn_implementation: str = "sdpa",
    ) -> None:
        super().__init__()
        decoder, eps = config.decoder, config.decoder.rms_norm_eps
        self.config = config
        self.hf_config = decoder.to_transformers(attn_implementation)
        self.set_draft_vocabulary("eagle3", d2t)
        shape = (decoder.vocab_size, decoder.hidden_size)
        self.embed_tokens = build_embedding("eagle3", shape, has_own=config.has_embedding, target=embedding)
        num_features = len(config.feature_layers)
        fc_width = num_features * config.target_hidden_size
        self.input_norm = rms_norm(fc_width, eps) if config.norm_before_fc else None
        norms = [rms_norm(config.target_hidden_size, eps) for _ in range(num_features)] if config.fc_norm else None
        self.fc_norm = None if norms is None else nn.ModuleList(norms)
        self.fc = nn.Linear(fc_width, decoder.hidden_size, bias=config.fc_bias) if config.has_fc else None
        self.mask_hidden = None if config.mask_token_id is None else nn.Parameter(torch.zeros(fc_width))
        further = [build_layer(decoder, self.hf_config, index) for index in range(1, decoder.num_hidden_layers)]
        self.layers = nn.ModuleList([Eagle3Layer(config, self.hf_config), *further])
        self.rotary_emb = Float32RotaryEmbedding(self.hf_config)
        self.norm = rms_norm(decoder.hidden_size, eps)
        head_shape = (config.draft_vocab_size, decoder.hidden_size)
        self.lm_head = build_lm_head("eagle3", head_shape, has_own=config.has_lm_head, target=lm_head)

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps hidden_states [..., len(feature_layers) * target_hidden_size], in that order -> feature [..., H]."""
        if self.fc is None:
            return hidden_states
        hidden_states = hidden_states.to(self.embed_tokens.weight.dtype)
        if self.input_norm is not None:
            hidden_states = self.input_norm(hidden_states)
        if self.fc_norm is not None:
            parts = hidden_states.chunk(len(self.fc_norm), dim=-1)
            hidden_states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(hidden_states)  # type: ignore[no-any-return]

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        """Maps token_ids, position_ids int64 [B, T], features [B, T, H] (fused or from forward) -> next features.

        Row i pairs a position's feature with the token after it, as given. attention_mask [B or 1, 1, T, S] is added to
        the scores (boolean for "sdpa" only); None means causal. attention_kwargs are passed to the attention function.
        """
        embeddings = self.embed_tokens(token_ids)
        hidden_states = features.to(embeddings.dtype)
        layer_kwargs = {
            "attention_mask": causal_mask(self.hf_config, hidden_states, attention_mask),
            "position_ids": position_ids,
            "position_embeddings": self.rotary_emb(hidden_states, position_ids),
            **attention_kwargs,
        }
        for index, layer in enumerate(self.layers):
            hidden_states = (
                layer(embeddings, hidden_states, **layer_kwargs) if index == 0 else layer(hidden_states, **layer_kwargs)
            )
        return self.norm(hidden_states) if self.config.norm_output else hidden_states

    def logits(self, features: torch.Tensor) -> torch.Tensor:
        """Maps features [..., H] from forward -> logits [..., draft_vocab_size] of the token after the next."""
        return self.lm_head(features if self.config.norm_output else self.norm(features))  # type: ignore[no-any-return]
