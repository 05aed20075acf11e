"""Reads the decoder layers of a head's checkpoint, from a Llama-like config and its tensors' names.

Biases and per-head norms are detected from the tensors: Qwen checkpoints have them without saying so in the config. Not
here: what is specific to a kind of head (eagle.py, eagle3.py, block.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.drafting.checkpoints.config_fields import ConfigFields, read_config
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.recognise import foreign_algorithm, require_not_quantised
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.decoder import ROPE_TYPES, DecoderConfig, LatentSizes

# Numbers required by each RoPE type.
_ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_OPTIONAL_ROPE_NUMBERS = (
    *("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    "llama_4_scaling_beta",
)
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
MAX_HEAD_DIM = 4096
# elements; least width of keys, values and latents that the CPU kernel loads
_MIN_LATENT_DIM = 16


@dataclass(frozen=True)
class HeadSettings:
    """The settings of a head's config.json: `own` is the top level, `nested` an object in it, `decoder` the layers'.

    nested_first: where a setting may be in either, the nested one counts.
    """

    own: ConfigFields
    nested: ConfigFields
    decoder: ConfigFields
    is_speculators: bool
    nested_first: bool

    def holder(self, key: str) -> ConfigFields:
        """Returns the object that has a setting which may be at the top or nested."""
        first, second = (self.nested, self.own) if self.nested_first else (self.own, self.nested)
        return first if first.get(key) is not None else second


def read_settings(folder: Path, nested: str, *, nested_first: bool) -> HeadSettings:
    """Reads config.json, with the settings nested under this key and speculators' transformer_layer_config.

    Raises CheckpointRefused, also for quantised weights and for an algorithm that is not supported.
    """
    own = read_config(folder)
    require_not_quantised(folder, own)
    foreign = foreign_algorithm(own)
    if foreign is not None:
        raise CheckpointRefused(folder, f"it is a draft of algorithm {foreign}, which is not supported")
    is_speculators = own.get("speculators_model_type") is not None
    decoder = own.mapping("transformer_layer_config") if is_speculators else own
    if decoder is None:
        raise CheckpointRefused(own.file, "transformer_layer_config is absent, not an object")
    inner = own.mapping(nested) or ConfigFields(own.file, {})
    return HeadSettings(own, inner, decoder, is_speculators, nested_first)


def read_decoder(
    config: ConfigFields,
    table: TensorTable,
    target: TargetWeights,
    first_layer: str,
    *,
    rope_theta: float = 10000.0,
    may_slide: bool = False,
) -> DecoderConfig:
    """Reads the decoder's config.

    first_layer: the first layer's name in the file, "layers.0" or "midlayer". rope_theta: where the config has none.
    may_slide: the caller reads the layers' windows. Raises CheckpointRefused.
    """
    folder = table.folder
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    vocab_size = config.integer("vocab_size")
    config.require_equal("vocab_size", vocab_size, target.vocab_size, f"the target {target.path}")
    if hidden_size % num_heads and config.get("head_dim") is None:
        raise CheckpointRefused(config.file, f"hidden_size {hidden_size} is not a multiple of its {num_heads} heads")
    num_layers = config.integer("num_hidden_layers", 1, maximum=max(1, len(table.tensors)))
    if not may_slide:
        require_full_attention(config)
    for key in ("logit_scale", "logits_scaling"):
        if config.number(key, 1.0) != 1.0:
            raise CheckpointRefused(config.file, f"{key} is {config.get(key)}, only 1 is supported")
    has_norms = f"{first_layer}.self_attn.q_norm.weight" in table
    with refusing(folder, "reading its layers"):
        latent = _latent_sizes(config) if config.get("kv_lora_rank") else None
        decoder = DecoderConfig(
            hidden_size=hidden_size,
            intermediate_size=config.integer("intermediate_size"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_heads if latent else config.integer("num_key_value_heads", num_heads),
            head_dim=latent.qk_rope_head_dim
            if latent
            else config.integer("head_dim", max(1, hidden_size // num_heads), maximum=MAX_HEAD_DIM),
            vocab_size=vocab_size,
            num_hidden_layers=num_layers,
            model_type="mistral4" if latent else "qwen3" if has_norms else "llama",
            hidden_act=config.text("hidden_act", "silu"),
            rms_norm_eps=config.number("rms_norm_eps", 1e-6),
            max_position_embeddings=config.integer("max_position_embeddings", 2048, maximum=2**31),
            rope_parameters=read_rope(config, rope_theta),
            qkv_bias=f"{first_layer}.self_attn.q_proj.bias" in table or config.flag("attention_bias"),
            o_bias=f"{first_layer}.self_attn.o_proj.bias" in table,
            mlp_bias=f"{first_layer}.mlp.gate_proj.bias" in table or config.flag("mlp_bias"),
            latent=latent,
        )
    return decoder


def _latent_sizes(config: ConfigFields) -> LatentSizes:
    least = dict.fromkeys(("kv_lora_rank", "v_head_dim"), _MIN_LATENT_DIM)
    sizes = {name: config.integer(name, minimum=least.get(name, 1), maximum=MAX_HEAD_DIM) for name in _LATENT_SIZES}
    if sizes["qk_nope_head_dim"] + sizes["qk_rope_head_dim"] < _MIN_LATENT_DIM:
        wanted = f"at least {_MIN_LATENT_DIM} with qk_rope_head_dim, {sizes['qk_rope_head_dim']}"
        raise config.refused("qk_nope_head_dim", sizes["qk_nope_head_dim"], wanted)
    return LatentSizes(
        **sizes,
        q_lora_rank=None if config.get("q_lora_rank") is None else config.integer("q_lora_rank"),
        rope_interleave=config.flag("rope_interleave", True),
    )


def read_rope(config: ConfigFields, default_theta: float = 10000.0) -> Mapping[str, Any]:
    """Returns rope_parameters of transformers 5, or the equivalent of older rope_theta and rope_scaling.

    Raises CheckpointRefused for an unsupported type, naming the supported ones, or for a missing number.
    """
    fields = config.mapping("rope_parameters") or config.mapping("rope_scaling") or ConfigFields(config.file, {})
    rope_type = fields.text("rope_type", fields.text("type", "default"))
    if rope_type not in ROPE_TYPES:
        cause = f"its RoPE type is {rope_type!r}, supported are {', '.join(ROPE_TYPES)}"
        raise CheckpointRefused(config.file, cause)
    theta = fields.number("rope_theta", config.number("rope_theta", default_theta))
    found: dict[str, Any] = {"rope_type": rope_type, "rope_theta": theta}
    for key in _ROPE_NUMBERS[rope_type]:
        if key == "original_max_position_embeddings":
            found[key] = fields.integer(key, config.integer("max_position_embeddings", 2048, maximum=2**31))
        else:
            found[key] = fields.number(key)
    if rope_type == "yarn":
        found |= {key: fields.number(key) for key in _OPTIONAL_ROPE_NUMBERS if fields.get(key) is not None}
    if rope_type == "llama3" and found["high_freq_factor"] <= found["low_freq_factor"]:
        factors = f"low_freq_factor {found['low_freq_factor']}, high_freq_factor {found['high_freq_factor']}"
        raise CheckpointRefused(config.file, f"its RoPE has {factors}: the high one must be larger")
    return found


def require_full_attention(config: ConfigFields) -> None:
    """Raises CheckpointRefused for sliding-window layers."""
    layer_types = config.get("layer_types")
    if not isinstance(layer_types, list) or config.get("use_sliding_window") is False:
        return
    others = sorted({str(entry)[:40] for entry in layer_types if entry != "full_attention"})
    if others:
        raise CheckpointRefused(
            config.file, f"layer_types has {', '.join(others[:4])}, only full_attention is supported"
        )
