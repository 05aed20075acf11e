"""The config rules of mixtures of experts: gpt-oss, Qwen2-MoE, DeepSeek. Not here: Mixtral, Qwen3-MoE (config)."""

from __future__ import annotations

from typing import Any

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.rope import rope_parameters

# expert_gating_func; files of DeepSeek-V2 from before the key have none, nor have some of GLM-4.7-Flash, which means
# the sigmoid and is told apart by its vocabulary (llama.cpp, src/models/deepseek2.cpp).
_SOFTMAX, _SIGMOID = 1, 2
_GLM_VOCABULARY = 154880
# By the number of experts: (n_group, topk_group) of DeepSeek-V2 and V3 in config.json, which older files do not have.
_GROUPS = {160: (8, 3), 256: (8, 4)}
# rope.scaling.yarn_log_multiplier is this times mscale_all_dim in DeepSeek's files (llama.cpp, conversion/deepseek.py).
_LOG_MULTIPLIER = 0.1


def gpt_oss(file: GgufFile) -> dict[str, Any]:
    """Layers with a window and without take turns, the first has one; YaRN's bounds are not rounded (its config.json;
    the file says neither)."""
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "num_local_experts": file.own("expert_count"),
        "num_experts_per_tok": file.own("expert_used_count"),
        "intermediate_size": file.own("expert_feed_forward_length"),
        "sliding_window": file.own("attention.sliding_window"),
        "rope_parameters": rope_parameters(file) | {"truncate": False},
    }


def qwen2moe(file: GgufFile) -> dict[str, Any]:
    """llama.cpp leaves the chosen experts' weights as they are, and so do the published checkpoints."""
    return {
        "model_type": "qwen2_moe",
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": file.own("expert_count"),
        "num_experts_per_tok": file.own("expert_used_count"),
        "moe_intermediate_size": file.own("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.own("expert_shared_feed_forward_length"),
        "norm_topk_prob": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def latent_heads(file: GgufFile) -> dict[str, Any]:
    """Widths of a head. Files from before April 2025 give them under the general names; since then those are the
    latents', as of one head for keys and values."""
    num_heads, rotated = file.own("attention.head_count"), file.own("rope.dimension_count")
    is_split = "blk.0.attn_k_b.weight" in file.tensors
    file.require("attention.head_count_kv", 1 if is_split else num_heads)
    general = file.own("attention.key_length"), file.own("attention.value_length")
    key_length = file.own("attention.key_length_mla", None if is_split else general[0])
    value_length = file.own("attention.value_length_mla", None if is_split else general[1])
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_heads,
        "q_lora_rank": file.own("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": file.own("attention.kv_lora_rank"),
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": key_length - rotated,
        "v_head_dim": value_length,
        "rope_parameters": _latent_rope(file),
    }


def _latent_rope(file: GgufFile) -> dict[str, Any]:
    found = rope_parameters(file)
    if found["rope_type"] != "yarn":
        return found
    # Both scales are the same in every published checkpoint, and in llama.cpp.
    scale = round(file.own("rope.scaling.yarn_log_multiplier") / _LOG_MULTIPLIER, 6)
    return found | {"mscale": scale, "mscale_all_dim": scale}


def deepseek2(file: GgufFile) -> dict[str, Any]:
    num_experts = file.own("expert_count")
    groups = _GROUPS.get(num_experts, (1, 1))
    config = {
        "num_experts_per_tok": file.own("expert_used_count"),
        "n_routed_experts": num_experts,
        "n_shared_experts": file.own("expert_shared_count"),
        "moe_intermediate_size": file.own("expert_feed_forward_length"),
        "first_k_dense_replace": file.own("leading_dense_block_count", 0),
        "routed_scaling_factor": file.own("expert_weights_scale", 1.0),
        "n_group": file.own("expert_group_count", groups[0]),
        "topk_group": file.own("expert_group_used_count", groups[1]),
        "norm_topk_prob": bool(file.own("expert_weights_norm", False)),
        "attention_bias": False,
    }
    return config | _choice_of_experts(file, config)


def _choice_of_experts(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """DeepSeek-V3 chooses by sigmoids, V2 by the softmax."""
    gate = file.own("expert_gating_func", 0)
    if gate == 0 and file.own("vocab_size", 0) != _GLM_VOCABULARY:
        gate = _SOFTMAX
    if gate == _SIGMOID:
        return {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": True}
    if gate != _SOFTMAX:
        raise ModelRefused(file.path, f"its deepseek2.expert_gating_func is {gate!r}, which is not read")
    if config["norm_topk_prob"] or any(".exp_probs_b." in name for name in file.tensors):
        cause = (
            "it chooses experts by the softmax, and has expert_weights_norm or exp_probs_b, which DeepSeek-V2 has not"
        )
        raise ModelRefused(file.path, cause)
    method = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}
