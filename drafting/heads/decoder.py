"""The transformer layers of EAGLE heads: transformers' own classes, built from a small checked config.

Not here: the first layer's input (eagle.py, eagle3.py) and the attention function (transformers' interface; in serving
engine.attention.layer, registered by the caller).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mistral4.configuration_mistral4 import Mistral4Config
from transformers.models.mistral4.modeling_mistral4 import Mistral4DecoderLayer
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

from outrider.drafting.heads.errors import HeadConfigError, require_positive

# qwen3 is llama with a norm on each head's query and key; mistral4 is deepseek_v3 with queries scaled by position.
_FAMILIES: dict[str, tuple[type[Any], type[nn.Module]]] = {
    "llama": (LlamaConfig, LlamaDecoderLayer),
    "mistral4": (Mistral4Config, Mistral4DecoderLayer),
    "qwen3": (Qwen3Config, Qwen3DecoderLayer),
}
MODEL_TYPES = tuple(_FAMILIES)
# Only static RoPE, where a row's angles depend on its position alone. With "dynamic" and "longrope" they depend on the
# longest position in the batch.
ROPE_TYPES = ("default", "linear", "yarn", "llama3")


def _default_rope() -> Mapping[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of latent attention (DeepSeek-V2, arXiv 2405.04434), by transformers' names."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None  # None: queries are projected at once
    rope_interleave: bool = True  # neighbours are rotated, not the halves of a head

    def __post_init__(self) -> None:
        require_positive(
            "decoder",
            kv_lora_rank=self.kv_lora_rank,
            qk_nope_head_dim=self.qk_nope_head_dim,
            qk_rope_head_dim=self.qk_rope_head_dim,
            v_head_dim=self.v_head_dim,
            q_lora_rank=1 if self.q_lora_rank is None else self.q_lora_rank,
        )


@dataclass(frozen=True)
class DecoderConfig:
    """Sizes of a head's decoder layers; `vocab_size` is the target's. With latents, head_dim is the rotated part."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    num_hidden_layers: int = 1
    model_type: str = "llama"
    hidden_act: str = "silu"
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(default_factory=_default_rope)
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    latent: LatentSizes | None = None  # of mistral4 alone

    def __post_init__(self) -> None:
        require_positive(
            "decoder",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab_size,
            num_hidden_layers=self.num_hidden_layers,
            max_position_embeddings=self.max_position_embeddings,
        )
        if self.model_type not in MODEL_TYPES:
            choices = ", ".join(MODEL_TYPES)
            raise HeadConfigError(
                f"decoder: model_type={self.model_type!r} is not one of {choices}", param="model_type"
            )
        if (self.latent is not None) != (self.model_type == "mistral4"):
            raise HeadConfigError("decoder: latent attention is of model_type mistral4", param="latent")
        if self.num_attention_heads % self.num_key_value_heads:
            heads = f"{self.num_attention_heads} query heads over {self.num_key_value_heads} key-value heads"
            raise HeadConfigError(f"decoder: {heads} do not divide evenly", param="num_key_value_heads")
        if self.head_dim % 2:
            raise HeadConfigError(f"decoder: head_dim={self.head_dim} is odd, but RoPE needs pairs", param="head_dim")
        rope_type = self.rope_parameters.get("rope_type")
        if rope_type not in ROPE_TYPES:
            choices = ", ".join(ROPE_TYPES)
            raise HeadConfigError(f"decoder: rope_type={rope_type!r} is not one of {choices}", param="rope_parameters")

    def to_transformers(self, attn_implementation: str) -> Any:
        """Returns transformers' config of the family, with its attention implementation set."""
        config_class, _ = _FAMILIES[self.model_type]
        config = config_class(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            hidden_act=self.hidden_act,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
            attn_implementation=attn_implementation,
        )
        if self.latent is not None:
            sizes = dataclasses.asdict(self.latent) | {"first_k_dense_replace": self.num_hidden_layers}
            for name, size in (sizes | {"head_dim": self.head_dim}).items():
                setattr(config, name, size)
            unscaled = {"llama_4_scaling_beta": 0.0, "original_max_position_embeddings": self.max_position_embeddings}
            config.rope_parameters = unscaled | dict(self.rope_parameters)
        return config


class Float32RotaryEmbedding(LlamaRotaryEmbedding):  # type: ignore[misc]
    """Implements RoPE with frequencies that stay float32 for any dtype of the head.

    `module.to(torch.bfloat16)` would round them: at position 2,000, angles are then off by up to 0.9 radians with heads
    of 64.
    """

    def __init__(self, config: Any) -> None:
        # A head may be built on the meta device and filled by load_state_dict(assign=True), which lacks these buffers.
        with torch.device("cpu"):
            super().__init__(config)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Float32RotaryEmbedding:
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, frequencies in before.items():
            moved = self._buffers[name]
            if frequencies is not None and moved is not None:
                self._buffers[name] = frequencies.to(moved.device)
        return self


def build_layer(config: DecoderConfig, hf_config: Any, layer_idx: int, num_qkv_inputs: int | None = None) -> nn.Module:
    """Builds one decoder layer. num_qkv_inputs (default hidden_size): the width of its attention's input."""
    layer = _FAMILIES[config.model_type][1](hf_config, layer_idx)
    attention: Any = layer.self_attn
    num_inputs = config.hidden_size if num_qkv_inputs is None else num_qkv_inputs
    if config.latent is not None:
        for name in ("q_proj", "q_a_proj", "kv_a_proj_with_mqa"):
            if getattr(attention, name) is not None:
                setattr(attention, name, nn.Linear(num_inputs, getattr(attention, name).out_features, bias=False))
        return layer
    num_query_outputs = config.num_attention_heads * config.head_dim
    num_key_outputs = config.num_key_value_heads * config.head_dim
    attention.q_proj = nn.Linear(num_inputs, num_query_outputs, bias=config.qkv_bias)
    attention.k_proj = nn.Linear(num_inputs, num_key_outputs, bias=config.qkv_bias)
    attention.v_proj = nn.Linear(num_inputs, num_key_outputs, bias=config.qkv_bias)
    attention.o_proj = nn.Linear(num_query_outputs, config.hidden_size, bias=config.o_bias)
    if config.mlp_bias:
        mlp: Any = layer.mlp
        mlp.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        mlp.up_proj = nn.Linear(config.hidden_size, config.intermediate_size)
        mlp.down_proj = nn.Linear(config.intermediate_size, config.hidden_size)
    return layer


def rms_norm(width: int, eps: float) -> nn.Module:
    """Builds transformers' RMSNorm of the Llama family."""
    return LlamaRMSNorm(width, eps=eps)  # type: ignore[no-any-return]


def causal_mask(hf_config: Any, features: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor | None:
    """Returns the layers' mask.

    That is the caller's, or for "eager", which has no causality of its own, an additive lower triangle [1, 1, T, T] in
    the features' dtype. "sdpa" is causal without a mask, a paged kernel always.
    """
    if attention_mask is not None or hf_config._attn_implementation != "eager":
        return attention_mask
    num_rows = features.shape[1]
    mask = torch.full((num_rows, num_rows), torch.finfo(features.dtype).min, device=features.device)
    return torch.triu(mask, diagonal=1).to(features.dtype)[None, None]
