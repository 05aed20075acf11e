"""The architectures of Gemma 1 to 4."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.architecture import Architecture
from outrider.engine.model.gguf.family import Family, windows
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.joined import Joined, one_after_another
from outrider.engine.model.gguf.rope import rope_parameters

# Gemma 2's values where a file leaves them out, and the number of layers of the 27B (llama.cpp, src/models/gemma2.cpp).
_GEMMA2_WINDOW, _GEMMA2_ATTENTION_CAP, _GEMMA2_LOGIT_CAP = 4096, 50.0, 30.0
_GEMMA2_27B_LAYERS = 46
# Gemma 3: every sixth layer attends to all positions; RoPE base of the other layers; number of layers of the 27B.
_GEMMA3_PATTERN = 6
_GEMMA3_LOCAL_BASE = 10000.0
_GEMMA3_27B_LAYERS = 62
# Gemma 4: RoPE base of layers without a window; divisor from which on a frequency counts as not rotated.
_GEMMA4_BASE = 1000000.0
_NOT_ROTATED = 1e29
_KINDS = ("sliding_attention", "full_attention")
_ACTIVATION = {"hidden_activation": "gelu_pytorch_tanh"}


def _by_kind(full: dict[str, Any], sliding: dict[str, Any]) -> dict[str, Any]:
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}}


def _gemma2(file: GgufFile) -> dict[str, Any]:
    """Reads Gemma 2's layers: those with a window and those without alternate, beginning with one that has a window."""
    num_layers, head_dim = file.own("block_count"), file.own("attention.key_length")
    file.require("attention.sliding_window_pattern", len(_KINDS))
    file.require("rope.freq_base_swa", file.own("rope.freq_base", 10000.0))
    by_width = file.own("embedding_length") // file.own("attention.head_count")
    return {
        "layer_types": [_KINDS[layer % len(_KINDS)] for layer in range(num_layers)],
        "query_pre_attn_scalar": by_width if num_layers == _GEMMA2_27B_LAYERS else head_dim,
    }


def _gemma3(file: GgufFile) -> dict[str, Any]:
    common_rope, num_layers = rope_parameters(file), file.own("block_count")
    hidden_size, num_heads = file.own("embedding_length"), file.own("attention.head_count")
    head_dim = file.own("attention.key_length")
    local_base = file.own("rope.freq_base_swa", _GEMMA3_LOCAL_BASE)
    file.require("attention.sliding_window_pattern", _GEMMA3_PATTERN)
    return {
        "layer_types": [_KINDS[(layer + 1) % _GEMMA3_PATTERN == 0] for layer in range(num_layers)],
        "query_pre_attn_scalar": hidden_size // num_heads if num_layers == _GEMMA3_27B_LAYERS else head_dim,
        **_by_kind(common_rope, {"rope_theta": local_base, "rope_type": "default"}),
    }


def _per_layer(file: GgufFile) -> dict[str, Any]:
    """Reads the embeddings of each layer, and the number of layers that take the keys and values of others."""
    embeddings = file.tensors.get("per_layer_token_embd.weight", file.tensors["token_embd.weight"])
    return {
        "vocab_size_per_layer_input": int(embeddings.shape[1]),
        "hidden_size_per_layer_input": file.own("embedding_length_per_layer_input", 0),
        "num_kv_shared_layers": file.own("attention.shared_kv_layers", 0),
    }


def _gemma3n(file: GgufFile) -> dict[str, Any]:
    """Reads Gemma 3n's settings. A scale of sparsity is the normal quantile of the share; -inf: not sparse."""
    scales = file.own("activation_sparsity_scale")
    rotated = {"rope_theta": file.own("rope.freq_base_swa", _GEMMA3_LOCAL_BASE), "rope_type": "default"}
    return {
        "activation_sparsity_pattern": [round((1 + math.erf(scale / math.sqrt(2))) / 2, 6) for scale in scales],
        "laurel_rank": int(file.tensors["blk.0.laurel_l.weight"].shape[1]),
        **_by_kind(rope_parameters(file), rotated),
    }


def _gemma4_heads(file: GgufFile) -> dict[str, Any]:
    """Reads the heads of layers with a window, and of those without, which may have no values of their own."""
    head_dim, global_head_dim = file.own("attention.key_length_swa"), file.own("attention.key_length")
    file.require("attention.value_length_swa", head_dim)
    file.require("attention.value_length", global_head_dim)
    file.require("rope.dimension_count_swa", head_dim)
    file.require("rope.dimension_count", global_head_dim)
    own = file.num_layers - file.own("attention.shared_kv_layers", 0)
    full = [layer for layer, has_window in enumerate(file.own("attention.sliding_window_pattern")) if not has_window]
    shares = any(f"blk.{layer}.attn_v.weight" not in file.tensors for layer in full if layer < own)
    counts = file.own("attention.head_count_kv")
    kinds = [counts] * 2 if not isinstance(counts, list) else [counts[0], counts[full[0]]]
    if isinstance(counts, list) and (0 in full or (kinds[0] != kinds[1] and not shares)):
        raise file.not_read(f"its gemma4.attention.head_count_kv is {counts}, which is not read")
    return {
        "num_attention_heads": file.own("attention.head_count"),
        "num_key_value_heads": kinds[0],
        "num_global_key_value_heads": kinds[1],
        "head_dim": head_dim,
        "global_head_dim": global_head_dim,
        "attention_k_eq_v": shares,
        **_by_kind(
            {
                "rope_theta": file.own("rope.freq_base", _GEMMA4_BASE),
                "rope_type": "proportional",
                "partial_rotary_factor": _rotated_share(file),
            },
            {"rope_theta": file.own("rope.freq_base_swa", _GEMMA3_LOCAL_BASE), "rope_type": "default"},
        ),
    }


def _rotated_share(file: GgufFile) -> float:
    """Returns the share of frequencies that are rotated. The file divides the others by nearly infinity."""
    if "rope_freqs.weight" not in file.tensors:
        raise ModelRefused(file.path, "it has no tensor rope_freqs.weight", "download it again")
    divisors = file.tensors["rope_freqs.weight"].data
    rotated = int((divisors == 1).sum())
    if not ((divisors[:rotated] == 1).all() and (divisors[rotated:] >= _NOT_ROTATED).all()):
        raise file.not_read("its rope_freqs are not those of Gemma 4")
    return rotated / len(divisors)


def _gemma4(file: GgufFile) -> dict[str, Any]:
    """Reads Gemma 4's feed-forward layers. Layers that take others' keys and values may be twice as wide."""
    widths = file.own("feed_forward_length")
    widths = widths if isinstance(widths, list) else [widths] * file.num_layers
    own = file.num_layers - file.own("attention.shared_kv_layers", 0)
    is_double = widths[-1] != widths[0]
    if widths != [widths[0]] * own + [widths[0] * (1 + is_double)] * (file.num_layers - own):
        raise file.not_read(f"its gemma4.feed_forward_length is {widths}, which is not read")
    num_experts = file.own("expert_count", 0)
    experts = {
        "num_experts": num_experts,
        "top_k_experts": file.own("expert_used_count", 0),
        "moe_intermediate_size": file.own("expert_feed_forward_length", 0),
    }
    common = {
        "intermediate_size": widths[0],
        "use_double_wide_mlp": is_double,
        "enable_moe_block": num_experts > 0,
        "final_logit_softcapping": file.own("final_logit_softcapping", 0.0) or None,
    }
    return common | (experts if num_experts else {})


_NORMS_AROUND = ("pre_feedforward_layernorm", "post_feedforward_layernorm")
# Embeddings of each layer: Gemma 3n and 4.
_PER_LAYER = ("per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm")
_PER_LAYER_OUTSIDE = (
    "model.embed_tokens_per_layer",
    "model.per_layer_model_projection",
    "model.per_layer_projection_norm",
)
GEMMA: Mapping[str, Architecture] = {
    "gemma": Architecture(Family("gemma", "GemmaForCausalLM", fixed=_ACTIVATION), norms_plus_one=True),
    "gemma2": Architecture(
        Family(
            "gemma2",
            "Gemma2ForCausalLM",
            {
                "sliding_window": ("attention.sliding_window", _GEMMA2_WINDOW),
                "attn_logit_softcapping": ("attn_logit_softcapping", _GEMMA2_ATTENTION_CAP),
                "final_logit_softcapping": ("final_logit_softcapping", _GEMMA2_LOGIT_CAP),
            },
            _ACTIVATION,
            (_gemma2,),
        ),
        modules=_NORMS_AROUND,
        norms_plus_one=True,
        has_tokenizer_class=True,
    ),
    "gemma3": Architecture(
        Family(
            "gemma3_text",
            "Gemma3ForCausalLM",
            {"sliding_window": "attention.sliding_window"},
            _ACTIVATION,
            (_gemma3,),
        ),
        modules=_NORMS_AROUND,
        norms_plus_one=True,
        has_tokenizer_class=True,
    ),
    "gemma3n": Architecture(
        Family(
            "gemma3n_text",
            "Gemma3nForCausalLM",
            {
                "altup_active_idx": "altup.active_idx",
                "altup_num_inputs": "altup.num_inputs",
                "final_logit_softcapping": ("final_logit_softcapping", _GEMMA2_LOGIT_CAP),
            },
            _ACTIVATION,
            (windows(5), _per_layer, _gemma3n),
        ),
        modules=(
            *_NORMS_AROUND,
            *_PER_LAYER,
            *(f"altup.{name}" for name in ("correction_coefs", "prediction_coefs", "modality_router", "router_norm")),
            *(f"laurel.{name}" for name in ("linear_left", "linear_right", "post_laurel_norm")),
        ),
        parameters={"altup_correct_scale.weight": "altup.correct_output_scale"},
        outside=(*_PER_LAYER_OUTSIDE, "model.altup_projections.*", "model.altup_unembed_projections.*"),
        tokenizer_like="gemma3",
    ),
    "gemma4": Architecture(
        Family("gemma4_text", "Gemma4ForCausalLM", fixed=_ACTIVATION, more=(windows(6), _per_layer, _gemma4)),
        heads=_gemma4_heads,
        has_one_width=False,
        modules=(
            *_NORMS_AROUND,
            *_PER_LAYER,
            "router.proj",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        ),
        parameters={
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        outside=_PER_LAYER_OUTSIDE,
        joined=(
            Joined("experts.gate_up_proj", ("ffn_gate_up_exps.weight",), one_after_another),
            Joined("experts.down_proj", ("ffn_down_exps.weight",), one_after_another),
        ),
    ),
}
