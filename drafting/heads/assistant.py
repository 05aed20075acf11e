"""Gemma 4's assistant: a few layers that attend to the target's own keys and values.

    z   = pre_projection([embedding(token_{t+1}); feature_t])
    h   = norm(layers(z)),   logits of token t + 2 = output(h),   the next feature = post_projection(h)
Embedding and feature (the last hidden state after the final norm) are the target's. The layers have queries only, all
at position t + 1, also in later steps of a chain; keys and values are those of the target's last layers of each type
that compute some, of positions 0 to t. Here they are computed again from the hidden states that enter those layers, so
a drafter needs no access to the target's cache. As transformers' Gemma4Assistant, whose layers these are.
Not here: checkpoints (drafting.checkpoints.assistant), the cache and drafting (drafting.methods.assistant).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers.models.gemma4.modeling_gemma4 import apply_rotary_pos_emb

from outrider.drafting.heads.errors import HeadConfigError

KeysAndValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AssistantConfig:
    """The config of an assistant.

    decoder: transformers' config of the target's text model. layers: that of the assistant's. num_centroids: 0 if every
    token gets a logit; else only the tokens of the `top_centroids` nearest clusters do.
    """

    decoder: Any
    layers: Any
    num_centroids: int = 0
    top_centroids: int = 0

    def __post_init__(self) -> None:
        ours, theirs = self.layers, self.decoder
        if ours.model_type != theirs.model_type:
            self._refuse("model_type", f"an assistant of {ours.model_type}, the target is {theirs.model_type}")
        if ours.vocab_size != theirs.vocab_size:
            self._refuse("vocab_size", f"vocab_size is {ours.vocab_size}, the target's is {theirs.vocab_size}")
        for index, layer_type in enumerate(ours.layer_types):
            if layer_type not in self.sources:
                self._refuse("layer_types", f"layer {index} is {layer_type}, no layer of the target computes such keys")
            own, source = ours.per_layer_config[index], theirs.per_layer_config[self.sources[layer_type]]
            for name in ("head_dim", "num_key_value_heads"):
                found, wanted = getattr(own, name), getattr(source, name)
                if found != wanted:
                    self._refuse(name, f"{name} of {layer_type} is {found}, the target's is {wanted}")
        if self.num_centroids and (
            ours.vocab_size % self.num_centroids or not 1 <= self.top_centroids <= self.num_centroids
        ):
            found = f"num_centroids={self.num_centroids}, centroid_intermediate_top_k={self.top_centroids}"
            self._refuse("num_centroids", f"{found} do not fit {ours.vocab_size} tokens")

    @property
    def sources(self) -> Mapping[str, int]:
        """Maps a layer type -> the last layer of the target of that type that computes keys and values."""
        num_computing = self.decoder.num_hidden_layers - self.decoder.num_kv_shared_layers
        last = {layer_type: index for index, layer_type in enumerate(self.decoder.layer_types[:num_computing])}
        return {
            layer_type: last[layer_type] for layer_type in dict.fromkeys(self.layers.layer_types) if layer_type in last
        }

    def _refuse(self, param: str, cause: str) -> None:
        raise HeadConfigError(f"assistant: {cause}", param=param)


class TargetKeys(nn.Module):
    """The keys and values of one layer of the target.

    State dict: `norm.weight`, and `attention.*` of its projections.
    """

    def __init__(self, layer: Any, rotary: nn.Module) -> None:
        super().__init__()
        self.norm = layer.input_layernorm
        self.attention = layer.self_attn
        self.layer_type: str = layer.self_attn.layer_type
        self.rotary = rotary
        for unused in ("q_proj", "q_norm", "o_proj"):
            delattr(self.attention, unused)

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> KeysAndValues:
        """Maps the hidden states [T, H] that enter the layer -> its keys and values [T, Hkv, D], keys rotated."""
        attention: Any = self.attention
        normed = self.norm(hidden)
        keys = attention.k_proj(normed).unflatten(-1, (-1, attention.head_dim))
        values = keys
        if attention.v_proj is not None:
            values = attention.v_proj(normed).unflatten(-1, (-1, attention.head_dim))
        cos, sin = self.rotary(normed, position_ids[None], self.layer_type)
        return apply_rotary_pos_emb(attention.k_norm(keys), cos[0], sin[0], unsqueeze_dim=1), attention.v_norm(values)


class AssistantHead(nn.Module):
    """An assistant.

    State dict: `model.*`, `pre_projection.weight`, `post_projection.weight`, `output.weight`, `keys.*`, and with
    centroids `centroids.weight`. body, target_body: transformers' text models of both configs, whose modules are taken;
    embedding: the target's, scaled; token_ordering int64 [V]: the tokens by cluster.
    """

    target_ids = None
    token_ordering: torch.Tensor

    def __init__(
        self,
        config: AssistantConfig,
        body: Any,
        target_body: Any,
        *,
        embedding: nn.Module,
        token_ordering: torch.Tensor | None = None,
    ) -> None:
        super().__init__()
        width, target_width, vocab_size = (
            config.layers.hidden_size,
            config.decoder.hidden_size,
            config.layers.vocab_size,
        )
        self.config = config
        self.embed_tokens = embedding
        self.keys = nn.ModuleList(
            [TargetKeys(target_body.layers[index], target_body.rotary_emb) for index in config.sources.values()]
        )
        body.embed_tokens = nn.Identity()  # the layers' input is given
        for layer in body.layers:
            layer.self_attn.is_kv_shared_layer = True
            for unused in ("k_proj", "k_norm", "v_proj", "v_norm"):
                delattr(layer.self_attn, unused)
        self.model = body
        self.pre_projection = nn.Linear(2 * target_width, width, bias=False)
        self.post_projection = nn.Linear(width, target_width, bias=False)
        self.centroids: nn.Linear | None = None
        self.output: nn.Module = nn.Linear(width, vocab_size, bias=False)
        if config.num_centroids:
            self.centroids = nn.Linear(width, config.num_centroids, bias=False)
            self.output = nn.Embedding(vocab_size, width)  # only the rows of a few tokens are read
            self.register_buffer("token_ordering", token_ordering, persistent=False)

    @property
    def feature_layers(self) -> tuple[int, ...]:
        """Returns the target's hidden states that it reads, in transformers' numbering: the feature is the last."""
        return (*self.config.sources.values(), self.config.decoder.num_hidden_layers)

    def fuse(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Maps hidden_states [..., layers * H] -> themselves."""
        return hidden_states

    def keys_and_values(self, hidden_states: torch.Tensor, position_ids: torch.Tensor) -> dict[str, KeysAndValues]:
        """Maps hidden_states [T, layers * H] of `feature_layers` -> keys and values [T, Hkv, D] by layer type."""
        parts = hidden_states.chunk(len(self.keys) + 1, dim=-1)
        pairs = zip(self.config.sources, self.keys, parts[:-1], strict=True)
        return {layer_type: keys(part, position_ids) for layer_type, keys, part in pairs}

    def forward(
        self,
        token_ids: torch.Tensor,
        features: torch.Tensor,
        position_ids: torch.Tensor,
        shared_kv_states: Mapping[str, KeysAndValues],
        attention_mask: Mapping[str, torch.Tensor | None] | None = None,
        **attention_kwargs: Any,
    ) -> torch.Tensor:
        """Maps token_ids, position_ids int64 [B, T], features [B, T, H] of the target -> h [B, T, width].

        shared_kv_states: [B, Hkv, K, D] by layer type. attention_mask: by layer type; None: the attention function's.
        attention_kwargs are passed to it.
        """
        embeddings = self.embed_tokens(token_ids)
        inputs = self.pre_projection(torch.cat((embeddings, features.to(embeddings.dtype)), dim=-1))
        return self.model(  # type: ignore[no-any-return]
            inputs_embeds=inputs,
            position_ids=position_ids,
            attention_mask=dict(attention_mask or dict.fromkeys(self.config.sources)),
            shared_kv_states=dict(shared_kv_states),
            use_cache=False,
            **attention_kwargs,
        ).last_hidden_state

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Maps h [N, width] -> logits [N, V] of the token after the next; -inf for tokens of other clusters."""
        if self.centroids is None:
            return self.output(hidden)  # type: ignore[no-any-return]
        config = self.config
        nearest = self.centroids(hidden).topk(config.top_centroids, dim=-1).indices
        token_ids = self.token_ordering.view(config.num_centroids, -1)[nearest].flatten(1)
        # Not a matrix product, whose bits may depend on the other rows.
        scores = (self.output(token_ids) * hidden[:, None]).sum(-1)
        return hidden.new_full((len(hidden), config.layers.vocab_size), -torch.inf).scatter_(1, token_ids, scores)
