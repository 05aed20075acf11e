"""The config rules of families without experts and recurrent layers. Not here: Gemma's (gemma)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.gguf.family import Family, Rules, has, windows
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.rope import longrope_parameters, rope_parameters

# tokens; context and window of Phi-3's short versions, whose older files leave the window out (their config.json).
_PHI3_SHORT_CONTEXT, _PHI3_SHORT_WINDOW = 4096, 2047
# tokens; StarCoder2's window in every published config.json, which no file has.
_STARCODER2_WINDOW = 4096
# SmolLM3: every fourth layer has no RoPE (llama.cpp, src/models/smollm3.cpp).
_SMOLLM3_WITHOUT_ROPE = 4
_ATTENTION_BIAS = has("attn_q.bias", "attention_bias")
_MLP_BIAS = has("ffn_up.bias", "mlp_bias")
# Of Granite, its mixtures and hybrids.
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
    """Positions are scaled in layers without a window alone."""
    base = file.own("rope.freq_base", 10000.0)
    local = {"rope_theta": file.own("rope.freq_base_swa", base), "rope_type": "default"}
    return {"rope_parameters": {"full_attention": rope_parameters(file), "sliding_attention": local}}


_OLMO2 = Family("olmo2", "Olmo2ForCausalLM", fixed={"attention_bias": False})
# Of the same name in llama.cpp.
_OLMO3 = Family("olmo3", "Olmo3ForCausalLM", fixed={"attention_bias": False}, more=(windows(4), _olmo3))


def phi3_heads(file: GgufFile) -> dict[str, Any]:
    """A head may be rotated in part (Phi-4-mini)."""
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
    """A window of 0 is none. llama.cpp leaves the windows out; the checkpoints, and so this, do not."""
    is_short = file.own("context_length") == _PHI3_SHORT_CONTEXT
    return {"sliding_window": file.own("attention.sliding_window", _PHI3_SHORT_WINDOW if is_short else 0) or None}


def _smollm3(file: GgufFile) -> dict[str, Any]:
    return {"no_rope_layers": [int((layer + 1) % _SMOLLM3_WITHOUT_ROPE != 0) for layer in range(file.num_layers)]}


_COHERE = {"logit_scale": "logit_scale"}
DENSE: Mapping[str, Rules] = {
    "arcee": Family("arcee", "ArceeForCausalLM", more=(_ATTENTION_BIAS, _MLP_BIAS)),
    "cohere2": Family("cohere2", "Cohere2ForCausalLM", _COHERE, more=(_ATTENTION_BIAS, windows(4))),
    "command-r": Family(
        "cohere",
        "CohereForCausalLM",
        _COHERE,
        more=(_ATTENTION_BIAS, has("attn_q_norm.weight", "use_qk_norm")),
    ),
    "ernie4_5": Family("ernie4_5", "Ernie4_5ForCausalLM", more=(has("attn_q.bias", "use_bias"),)),
    "exaone4": Family("exaone4", "Exaone4ForCausalLM", more=(windows(4),)),
    "glm4": Family("glm4", "Glm4ForCausalLM", more=(_ATTENTION_BIAS,)),
    "granite": Family("granite", "GraniteForCausalLM", GRANITE_SCALES, more=(_ATTENTION_BIAS, _MLP_BIAS)),
    "hunyuan-dense": Family("hunyuan_v1_dense", "HunYuanDenseV1ForCausalLM", more=(_ATTENTION_BIAS,)),
    "llama": _llama,
    "olmo2": _olmo2,
    "phi3": Family("phi3", "Phi3ForCausalLM", more=(_phi3,)),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM", fixed={"use_sliding_window": False}),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", fixed={"use_sliding_window": False}, more=(_ATTENTION_BIAS,)),
    "seed_oss": Family(
        "seed_oss",
        "SeedOssForCausalLM",
        more=(_ATTENTION_BIAS, has("attn_output.bias", "attention_out_bias"), _MLP_BIAS),
    ),
    "smollm3": Family(
        "smollm3",
        "SmolLM3ForCausalLM",
        fixed={"use_sliding_window": False},
        more=(_ATTENTION_BIAS, _MLP_BIAS, _smollm3),
    ),
    "starcoder2": Family(
        "starcoder2",
        "Starcoder2ForCausalLM",
        fixed={"sliding_window": _STARCODER2_WINDOW},
        more=(has("attn_q.bias", "use_bias"),),
    ),
}
