"""The architectures without experts and recurrent layers. Not here: Gemma's (gemma)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.gguf.architecture import Architecture, experts
from outrider.engine.model.gguf.family import Family, has, heads_rotated_in_part, windows
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.rope import LONGROPE_FACTORS, longrope_parameters, rope_parameters
from outrider.engine.model.gguf.undone import rotated_pairs

# tokens; context and window of Phi-3's short versions; older files leave out the window (source: their config.json)
_PHI3_SHORT_CONTEXT, _PHI3_SHORT_WINDOW = 4096, 2047
# tokens; StarCoder2's window in every published config.json; no file states it
_STARCODER2_WINDOW = 4096
# SmolLM3: every fourth layer has no RoPE (llama.cpp, src/models/smollm3.cpp).
_SMOLLM3_WITHOUT_ROPE = 4
_ATTENTION_BIAS = has("attn_q.bias", "attention_bias")
_MLP_BIAS = has("ffn_up.bias", "mlp_bias")
# The scales of Granite, its mixtures and its hybrids.
GRANITE_SCALES = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _llama(file: GgufFile) -> dict[str, Any]:
    return (_MIXTRAL if file.own("expert_count", 0) else _LLAMA)(file)


def _without_biases(file: GgufFile) -> dict[str, Any]:
    if "blk.0.attn_q.bias" in file.tensors:
        raise file.not_read("it has experts and biases of attention, and Mixtral has none")
    return {}


_LLAMA = Family("llama", "LlamaForCausalLM", more=(_ATTENTION_BIAS, _MLP_BIAS))
_MIXTRAL = Family(
    "mixtral",
    "MixtralForCausalLM",
    {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
    {"sliding_window": None},
    (_without_biases,),
)


def _olmo2(file: GgufFile) -> dict[str, Any]:
    return (_OLMO3 if file.own("attention.sliding_window", 0) else _OLMO2)(file)


def _olmo3(file: GgufFile) -> dict[str, Any]:
    """Sets RoPE by the kind of layer: positions are scaled only in layers without a window."""
    base = file.own("rope.freq_base", 10000.0)
    local = {"rope_theta": file.own("rope.freq_base_swa", base), "rope_type": "default"}
    return {"rope_parameters": {"full_attention": rope_parameters(file), "sliding_attention": local}}


_OLMO2 = Family("olmo2", "Olmo2ForCausalLM", fixed={"attention_bias": False})
# llama.cpp uses the same architecture name for OLMo 2 and OLMo 3.
_OLMO3 = Family("olmo3", "Olmo3ForCausalLM", fixed={"attention_bias": False}, more=(windows(4), _olmo3))


def _phi3_heads(file: GgufFile) -> dict[str, Any]:
    """Reads Phi-3's heads, which may be rotated in part (Phi-4-mini)."""
    num_heads = file.own("attention.head_count")
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.own("attention.head_count_kv", num_heads),
        "original_max_position_embeddings": file.own(
            "rope.scaling.original_context_length", file.own("context_length")
        ),
        "rope_parameters": longrope_parameters(file, file.own("embedding_length") // num_heads),
    }


def _phi3(file: GgufFile) -> dict[str, Any]:
    """Reads Phi-3's window; 0 means none. llama.cpp ignores the windows; the checkpoints do not, nor does this."""
    is_short = file.own("context_length") == _PHI3_SHORT_CONTEXT
    return {"sliding_window": file.own("attention.sliding_window", _PHI3_SHORT_WINDOW if is_short else 0) or None}


def _smollm3(file: GgufFile) -> dict[str, Any]:
    return {"no_rope_layers": [int((layer + 1) % _SMOLLM3_WITHOUT_ROPE != 0) for layer in range(file.num_layers)]}


_COHERE = {"logit_scale": "logit_scale"}
_LAYER_NORM = ("layer_norm_eps", "attention.layer_norm_epsilon")
# Norms after attention and after the feed-forward layer, none before.
_NORMS_AFTER = ("post_feedforward_layernorm",)
DENSE: Mapping[str, Architecture] = {
    "arcee": Architecture(
        Family("arcee", "ArceeForCausalLM", more=(_ATTENTION_BIAS, _MLP_BIAS)), row_order=rotated_pairs
    ),
    "cohere2": Architecture(
        Family("cohere2", "Cohere2ForCausalLM", _COHERE, more=(_ATTENTION_BIAS, windows(4))), epsilon=_LAYER_NORM
    ),
    "command-r": Architecture(
        Family(
            "cohere",
            "CohereForCausalLM",
            _COHERE,
            more=(_ATTENTION_BIAS, has("attn_q_norm.weight", "use_qk_norm")),
        ),
        epsilon=_LAYER_NORM,
    ),
    "ernie4_5": Architecture(Family("ernie4_5", "Ernie4_5ForCausalLM", more=(has("attn_q.bias", "use_bias"),))),
    "exaone4": Architecture(Family("exaone4", "Exaone4ForCausalLM", more=(windows(4),)), modules=_NORMS_AFTER),
    "glm4": Architecture(
        Family("glm4", "Glm4ForCausalLM", more=(_ATTENTION_BIAS,)),
        heads=heads_rotated_in_part,
        modules=("post_self_attn_layernorm", "post_mlp_layernorm", "mlp.gate_up_proj"),
    ),
    "granite": Architecture(
        Family("granite", "GraniteForCausalLM", GRANITE_SCALES, more=(_ATTENTION_BIAS, _MLP_BIAS)),
        row_order=rotated_pairs,
    ),
    "hunyuan-dense": Architecture(
        Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", more=(_ATTENTION_BIAS,)),
        modules=("self_attn.query_layernorm", "self_attn.key_layernorm"),
    ),
    # Mixtral too.
    "llama": Architecture(
        _llama,
        modules=experts("block_sparse_moe", "w1", "w3", "w2"),
        row_order=rotated_pairs,
        has_tokenizer_class=True,
    ),
    "olmo2": Architecture(_olmo2, modules=_NORMS_AFTER),
    "phi3": Architecture(
        Family("phi3", "Phi3ForCausalLM", more=(_phi3,)),
        heads=_phi3_heads,
        modules=("self_attn.qkv_proj", "mlp.gate_up_proj"),
        in_config=LONGROPE_FACTORS,
        has_tokenizer_class=True,
    ),
    "qwen2": Architecture(
        Family("qwen2", "Qwen2ForCausalLM", fixed={"use_sliding_window": False}), has_tokenizer_class=True
    ),
    "qwen3": Architecture(
        Family("qwen3", "Qwen3ForCausalLM", fixed={"use_sliding_window": False}, more=(_ATTENTION_BIAS,)),
        has_tokenizer_class=True,
    ),
    "seed_oss": Architecture(
        Family(
            "seed_oss",
            "SeedOssForCausalLM",
            more=(_ATTENTION_BIAS, has("attn_output.bias", "attention_out_bias"), _MLP_BIAS),
        )
    ),
    "smollm3": Architecture(
        Family(
            "smollm3",
            "SmolLM3ForCausalLM",
            fixed={"use_sliding_window": False},
            more=(_ATTENTION_BIAS, _MLP_BIAS, _smollm3),
        ),
        row_order=rotated_pairs,
    ),
    "starcoder2": Architecture(
        Family(
            "starcoder2",
            "Starcoder2ForCausalLM",
            fixed={"sliding_window": _STARCODER2_WINDOW},
            more=(has("attn_q.bias", "use_bias"),),
        ),
        epsilon=("norm_epsilon", "attention.layer_norm_epsilon"),
        modules=("mlp.c_fc", "mlp.c_proj"),
    ),
}
