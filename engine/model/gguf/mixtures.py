"""The architectures with experts. Not here: Mixtral (dense), those with recurrent layers (hybrids)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.gguf.architecture import Architecture, experts, feed_forward
from outrider.engine.model.gguf.dense import GRANITE_SCALES
from outrider.engine.model.gguf.family import Family, Keys, has, heads_rotated_in_part, values
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.joined import (
    Joined,
    biases_in_turn,
    experts_in_turn,
    input_and_output,
    keys_and_values,
)
from outrider.engine.model.gguf.rope import rope_parameters
from outrider.engine.model.gguf.undone import rotated_pairs

# Values of expert_gating_func. Files of DeepSeek-V2 that are older than the key lack it; some of GLM-4.7-Flash lack it
# too, mean the sigmoid, and are recognised by their vocabulary (llama.cpp, src/models/deepseek2.cpp).
_SOFTMAX, SIGMOID = 1, 2
_GLM_VOCABULARY = 154880
# Maps the number of experts to config.json's (n_group, topk_group) of DeepSeek-V2 and V3, which older files lack.
_GROUPS = {160: (8, 3), 256: (8, 4)}
# ratio; rope.scaling.yarn_log_multiplier over mscale_all_dim in DeepSeek's files (llama.cpp, conversion/deepseek.py)
_LOG_MULTIPLIER = 0.1


QWEN_EXPERTS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
}
# Qwen's settings where every layer has experts.
_IN_EVERY_LAYER = {"decoder_sparse_step": 1, "mlp_only_layers": [], "use_sliding_window": False}
_CHOICE = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
# DeepSeek's keys of experts, which other architectures use too.
_DEEPSEEK: Keys = {
    "num_experts_per_tok": "expert_used_count",
    "n_routed_experts": "expert_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "first_k_dense_replace": ("leading_dense_block_count", 0),
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
    "norm_topk_prob": ("expert_weights_norm", False),
}


def _gpt_oss(file: GgufFile) -> dict[str, Any]:
    """Reads gpt-oss's RoPE: YaRN's bounds are not rounded (its config.json; the file does not say so)."""
    return {"rope_parameters": rope_parameters(file) | {"truncate": False}}


def _by_sigmoids(file: GgufFile) -> dict[str, Any]:
    """Checks that experts are chosen by sigmoids. Raises ModelRefused otherwise."""
    file.require("expert_gating_func", SIGMOID)
    return {}


def _granite_moe(file: GgufFile) -> dict[str, Any]:
    shared = file.own("expert_shared_feed_forward_length", 0)
    if not shared:
        return _GRANITE_MOE(file)
    return _GRANITE_MOE(file) | {
        "model_type": "granitemoeshared",
        "architectures": ["GraniteMoeSharedForCausalLM"],
        "shared_intermediate_size": shared,
    }


_GRANITE_MOE = Family("granitemoe", "GraniteMoeForCausalLM", {**GRANITE_SCALES, **_CHOICE})


def _last_layer(file: GgufFile) -> dict[str, Any]:
    return {"moe_layer_end_index": file.num_layers - 1}


def _latent_heads(file: GgufFile) -> dict[str, Any]:
    """Reads the widths of a head.

    Files from before April 2025 give them under the general names; since then those are the widths of the latents,
    which count as one head of keys and values.
    """
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


def _deepseek2(file: GgufFile) -> dict[str, Any]:
    n_group, topk_group = _GROUPS.get(file.own("expert_count"), (1, 1))
    keys: Keys = {
        **_DEEPSEEK,
        "n_group": ("expert_group_count", n_group),
        "topk_group": ("expert_group_used_count", topk_group),
    }
    config = values(file, keys)
    return config | {"attention_bias": False} | _choice_of_experts(file, config)


def _choice_of_experts(file: GgufFile, config: dict[str, Any]) -> dict[str, Any]:
    """Reads how experts are chosen: DeepSeek-V3 uses sigmoids, V2 the softmax."""
    gate = file.own("expert_gating_func", 0)
    if gate == 0 and file.own("vocab_size", 0) != _GLM_VOCABULARY:
        gate = _SOFTMAX
    if gate == SIGMOID:
        return {"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": True}
    if gate != _SOFTMAX:
        raise file.not_read(f"its deepseek2.expert_gating_func is {gate!r}, which is not read")
    if config["norm_topk_prob"] or any(".exp_probs_b." in name for name in file.tensors):
        cause = (
            "it chooses experts by the softmax, and has expert_weights_norm or exp_probs_b, which DeepSeek-V2 has not"
        )
        raise file.not_read(cause)
    method = "greedy" if config["n_group"] == 1 else "group_limited_greedy"
    return {"model_type": "deepseek_v2", "architectures": ["DeepseekV2ForCausalLM"], "topk_method": method}


_EXPERTS = experts("mlp")
_WITH_SHARED = (*_EXPERTS, *feed_forward("mlp.shared_experts"))
QWEN_MODULES = (*_EXPERTS, *feed_forward("mlp.shared_expert"), "mlp.shared_expert_gate")
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
# Granite's router, experts and shared feed-forward layer, in its hybrids too.
GRANITE_ROUTER = ("block_sparse_moe.router.layer",)
GRANITE_EXPERTS = (*input_and_output("block_sparse_moe", "_exps"), *input_and_output("shared_mlp", "_shexp"))
MIXTURES: Mapping[str, Architecture] = {
    "deepseek2": Architecture(
        _deepseek2,
        heads=_latent_heads,
        modules=(
            *_WITH_SHARED,
            *(
                f"self_attn.{name}"
                for name in (
                    "q_a_proj",
                    "q_a_layernorm",
                    "q_b_proj",
                    "kv_a_proj_with_mqa",
                    "kv_a_layernorm",
                    "kv_b_proj",
                )
            ),
        ),
        parameters=_CORRECTION,
        joined=(Joined("self_attn.kv_b_proj.weight", ("attn_k_b.weight", "attn_v_b.weight"), keys_and_values),),
    ),
    "dots1": Architecture(
        Family("dots1", "Dots1ForCausalLM", _DEEPSEEK, more=(_by_sigmoids, has("attn_q.bias", "attention_bias"))),
        modules=_WITH_SHARED,
        parameters=_CORRECTION,
    ),
    "ernie4_5-moe": Architecture(
        Family(
            "ernie4_5_moe",
            "Ernie4_5_MoeForCausalLM",
            {
                "moe_num_experts": "expert_count",
                "moe_k": "expert_used_count",
                "moe_num_shared_experts": "expert_shared_count",
                "moe_intermediate_size": "expert_feed_forward_length",
                "moe_layer_start_index": ("leading_dense_block_count", 0),
                "moe_layer_interval": "interleave_moe_layer_step",
            },
            more=(_last_layer, has("attn_q.bias", "use_bias")),
            ignored=("expert_shared_feed_forward_length",),  # the converter's is not the width
        ),
        modules=_WITH_SHARED,
        parameters={"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"},
        one_row=frozenset({"exp_probs_b"}),
    ),
    "glm4moe": Architecture(
        Family(
            "glm4_moe",
            "Glm4MoeForCausalLM",
            _DEEPSEEK,
            more=(_by_sigmoids, has("attn_q.bias", "attention_bias"), has("attn_q_norm.weight", "use_qk_norm")),
        ),
        heads=heads_rotated_in_part,
        modules=_WITH_SHARED,
        parameters=_CORRECTION,
    ),
    # Layers with a window and those without alternate, beginning with one that has a window.
    "gpt-oss": Architecture(
        Family(
            "gpt_oss",
            "GptOssForCausalLM",
            {
                **_CHOICE,
                "intermediate_size": "expert_feed_forward_length",
                "sliding_window": "attention.sliding_window",
            },
            more=(_gpt_oss,),
        ),
        modules=("mlp.router",),
        parameters={"attn_sinks.weight": "self_attn.sinks"},
        joined=(
            Joined("mlp.experts.gate_up_proj", ("ffn_gate_exps.weight", "ffn_up_exps.weight"), experts_in_turn),
            Joined("mlp.experts.down_proj", ("ffn_down_exps.weight",), experts_in_turn),
            Joined("mlp.experts.gate_up_proj_bias", ("ffn_gate_exps.bias", "ffn_up_exps.bias"), biases_in_turn),
            Joined("mlp.experts.down_proj_bias", ("ffn_down_exps.bias",), biases_in_turn),
        ),
    ),
    "granitemoe": Architecture(_granite_moe, modules=GRANITE_ROUTER, joined=GRANITE_EXPERTS, row_order=rotated_pairs),
    "minimax-m2": Architecture(
        Family(
            "minimax_m2",
            "MiniMaxM2ForCausalLM",
            {**_CHOICE, "intermediate_size": "expert_feed_forward_length"},
            more=(_by_sigmoids,),
        ),
        heads=heads_rotated_in_part,
        modules=experts("block_sparse_moe", "w1", "w3", "w2"),
        parameters={"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"},
    ),
    "olmoe": Architecture(
        Family(
            "olmoe",
            "OlmoeForCausalLM",
            {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
            {"norm_topk_prob": False},
            (has("attn_q.bias", "attention_bias"),),
        ),
        modules=_EXPERTS,
    ),
    # llama.cpp leaves the chosen experts' weights as they are, and so do the published checkpoints.
    "qwen2moe": Architecture(
        Family("qwen2_moe", "Qwen2MoeForCausalLM", QWEN_EXPERTS, {**_IN_EVERY_LAYER, "norm_topk_prob": False}),
        modules=QWEN_MODULES,
        has_tokenizer_class=True,
    ),
    # llama.cpp makes the chosen experts' weights add up to 1, whatever the checkpoint's norm_topk_prob was.
    "qwen3moe": Architecture(
        Family(
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            {name: key for name, key in QWEN_EXPERTS.items() if not name.startswith("shared")},
            {**_IN_EVERY_LAYER, "norm_topk_prob": True},
            (has("attn_q.bias", "attention_bias"),),
        ),
        modules=_EXPERTS,
        has_tokenizer_class=True,
    ),
}
