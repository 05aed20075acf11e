"""The config rules of families with recurrent layers: gated delta nets, Mamba-2, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.gguf.dense import GRANITE_SCALES
from outrider.engine.model.gguf.family import Family, Keys, Rules, has, layer_kinds
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.mixtures import QWEN_EXPERTS, SIGMOID

_RECURRENT, _FULL = "linear_attention", "full_attention"
_MAMBA_LAYERS = {"ssm_in.weight": _RECURRENT, "attn_q.weight": _FULL}
_DELTA_LAYERS = {"ssm_out.weight": _RECURRENT, "attn_q.weight": _FULL}
_CONVOLUTIONS = {"shortconv.conv.weight": "conv", "attn_q.weight": _FULL}
_NEMOTRON_LAYERS = {**_MAMBA_LAYERS, "ffn_gate_inp.weight": "moe", "ffn_up.weight": "mlp"}
_DELTA_NET = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
# Which layers are recurrent is seen from the tensors.
_SEEN = ("attention.recurrent_layers", "full_attention_interval")
_MAMBA = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}


def _head_dim(key: str) -> Rules:
    """Of recurrent layers, by what their heads have together."""
    return lambda file: {key: file.own("ssm.inner_size") // file.own("ssm.time_step_rank")}


def _granite(file: GgufFile) -> dict[str, Any]:
    """Without recurrent layers attention has RoPE; the file says so."""
    has_rope = file.own("rope.scaling.finetuned", True)
    return {
        "mamba_expand": file.own("ssm.inner_size") // file.own("embedding_length"),
        "position_embedding_type": "rope" if has_rope else "nope",
        "shared_intermediate_size": file.own("expert_shared_feed_forward_length", file.own("feed_forward_length")),
    }


def _falcon(file: GgufFile) -> dict[str, Any]:
    """The converter has multiplied the weights by what config.json calls multipliers."""
    if "output.weight" not in file.tensors:
        cause = "it has no output.weight; an embedding that is the head too cannot have the multipliers of both"
        raise file.not_read(cause)
    return {"mamba_d_ssm": file.own("ssm.inner_size")}


def _sections(file: GgufFile) -> dict[str, Any]:
    """Of positions of images; a text's are all the same, so that nothing depends on them."""
    file.own("rope.dimension_sections", [])
    return {}


def _lfm2_moe(file: GgufFile) -> dict[str, Any]:
    file.require("expert_gating_func", SIGMOID)
    return {"use_expert_bias": any(".exp_probs_b." in name for name in file.tensors)}


_LFM2 = {"conv_L_cache": "shortconv.l_cache"}
_QWEN_LAYERS = (layer_kinds(_DELTA_LAYERS), _head_dim("linear_value_head_dim"))
_NEMOTRON = {
    "conv_kernel": "ssm.conv_kernel",
    "ssm_state_size": "ssm.state_size",
    "n_groups": "ssm.group_count",
    "mamba_num_heads": "ssm.time_step_rank",
}
_NEMOTRON_EXPERTS: Keys = {
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_shared_experts": "expert_shared_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "routed_scaling_factor": ("expert_weights_scale", 1.0),
    "norm_topk_prob": ("expert_weights_norm", False),
    "n_group": ("expert_group_count", 1),
    "topk_group": ("expert_group_used_count", 1),
}
_NEMOTRON_RULES = (layer_kinds(_NEMOTRON_LAYERS, "layers_block_type"), _head_dim("mamba_head_dim"))
HYBRIDS: Mapping[str, Rules] = {
    "falcon-h1": Family(
        "falcon_h1",
        "FalconH1ForCausalLM",
        _MAMBA,
        {
            "mamba_norm_before_gate": False,
            "attention_in_multiplier": 1.0,
            "attention_out_multiplier": 1.0,
            "embedding_multiplier": 1.0,
            "key_multiplier": 1.0,
            "lm_head_multiplier": 1.0,
            "mlp_multipliers": [1.0] * 2,
            "ssm_in_multiplier": 1.0,
            "ssm_multipliers": [1.0] * 5,
            "ssm_out_multiplier": 1.0,
        },
        (_falcon, _head_dim("mamba_d_head"), has("ssm_norm.weight", "mamba_rms_norm")),
    ),
    "granitehybrid": Family(
        "granitemoehybrid",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            **GRANITE_SCALES,
            "num_local_experts": ("expert_count", 0),
            "num_experts_per_tok": ("expert_used_count", 0),
        },
        more=(_granite, _head_dim("mamba_d_head"), layer_kinds(_MAMBA_LAYERS)),
    ),
    "lfm2": Family(
        "lfm2", "Lfm2ForCausalLM", _LFM2, {"block_auto_adjust_ff_dim": False}, (layer_kinds(_CONVOLUTIONS),)
    ),
    "lfm2moe": Family(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        {
            **_LFM2,
            "num_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "num_dense_layers": ("leading_dense_block_count", 0),
        },
        {"norm_topk_prob": True},
        (layer_kinds(_CONVOLUTIONS), _lfm2_moe),
    ),
    "nemotron_h": Family("nemotron_h", "NemotronHForCausalLM", _NEMOTRON, more=_NEMOTRON_RULES),
    "nemotron_h_moe": Family(
        "nemotron_h", "NemotronHForCausalLM", {**_NEMOTRON, **_NEMOTRON_EXPERTS}, more=_NEMOTRON_RULES
    ),
    "qwen35": Family("qwen3_5_text", "Qwen3_5ForCausalLM", _DELTA_NET, more=(*_QWEN_LAYERS, _sections), ignored=_SEEN),
    "qwen35moe": Family(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        {**_DELTA_NET, **QWEN_EXPERTS},
        more=(*_QWEN_LAYERS, _sections),
        ignored=_SEEN,
    ),
    "qwen3next": Family(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        {**_DELTA_NET, **QWEN_EXPERTS},
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        _QWEN_LAYERS,
        _SEEN,
    ),
}
