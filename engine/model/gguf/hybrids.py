"""The architectures with recurrent layers: gated delta nets, Mamba-2, short convolutions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from outrider.engine.model.gguf.architecture import Architecture, feed_forward
from outrider.engine.model.gguf.dense import GRANITE_SCALES
from outrider.engine.model.gguf.family import (
    Family,
    Keys,
    Rules,
    has,
    heads_rotated_in_part,
    heads_without_rope,
    layer_kinds,
)
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.joined import Joined, by_key_head, input_and_output
from outrider.engine.model.gguf.mixtures import GRANITE_EXPERTS, GRANITE_ROUTER, QWEN_EXPERTS, QWEN_MODULES, SIGMOID
from outrider.engine.model.gguf.undone import rotated_pairs, value_head_columns, value_head_rows

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
# Keys that list the recurrent layers; they are ignored, as the tensors of a layer show its kind.
_SEEN = ("attention.recurrent_layers", "full_attention_interval")
_MAMBA = {
    "mamba_d_conv": "ssm.conv_kernel",
    "mamba_d_state": "ssm.state_size",
    "mamba_n_groups": "ssm.group_count",
    "mamba_n_heads": "ssm.time_step_rank",
}


def _head_dim(key: str) -> Rules:
    """Makes rules that set the head width of recurrent layers: their inner size divided by the number of heads."""
    return lambda file: {key: file.own("ssm.inner_size") // file.own("ssm.time_step_rank")}


def _granite(file: GgufFile) -> dict[str, Any]:
    """Reads Granite's settings. Attention has RoPE in models without recurrent layers; the file says so."""
    has_rope = file.own("rope.scaling.finetuned", True)
    return {
        "mamba_expand": file.own("ssm.inner_size") // file.own("embedding_length"),
        "position_embedding_type": "rope" if has_rope else "nope",
        "shared_intermediate_size": file.own("expert_shared_feed_forward_length", file.own("feed_forward_length")),
    }


def _falcon(file: GgufFile) -> dict[str, Any]:
    """Reads Falcon-H1's inner size. The converter has already applied config.json's multipliers to the weights."""
    if "output.weight" not in file.tensors:
        cause = "it has no output.weight; an embedding that is the head too cannot have the multipliers of both"
        raise file.not_read(cause)
    return {"mamba_d_ssm": file.own("ssm.inner_size")}


def _sections(file: GgufFile) -> dict[str, Any]:
    """Ignores the sections of image positions: a text's positions are the same in all, so nothing depends on them."""
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


def _mamba_modules(module: str) -> tuple[str, ...]:
    return tuple(f"{module}.{name}" for name in ("in_proj", "conv1d", "norm", "out_proj"))


def _mamba_parameters(module: str) -> dict[str, str]:
    return {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D", "ssm_dt.bias": f"{module}.dt_bias"}


_DELTA_MODULES = tuple(f"linear_attn.{name}" for name in ("conv1d", "norm", "out_proj"))
_DELTA_PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_QWEN35_MODULES = (
    *_DELTA_MODULES,
    *(f"linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "in_proj_qkv", "in_proj_z")),
)
_LFM2_MODULES = (
    "operator_norm",
    *(f"self_attn.{name}" for name in ("q_layernorm", "k_layernorm", "out_proj")),
    "ffn_norm",
    *(f"feed_forward.{name}" for name in ("w1", "w3", "w2")),
    *(f"conv.{name}" for name in ("conv", "in_proj", "out_proj")),
)
_LFM2_EPSILON = ("norm_eps", "attention.layer_norm_rms_epsilon")
_NEMOTRON_EPSILON = ("layer_norm_epsilon", "attention.layer_norm_epsilon")
_NEMOTRON_MODULES = (
    "norm",
    *_mamba_modules("mixer"),
    *(f"mixer.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj")),
)
_NEMOTRON_OUTSIDE = ("model.embeddings", "model.norm_f")
HYBRIDS: Mapping[str, Architecture] = {
    "falcon-h1": Architecture(
        Family(
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
        modules=(*_mamba_modules("mamba"), *feed_forward("feed_forward")),
        parameters=_mamba_parameters("mamba") | {"ffn_norm": "pre_ff_layernorm.weight"},
        outside=("model.final_layernorm",),
    ),
    "granitehybrid": Architecture(
        Family(
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
        modules=(*_mamba_modules("mamba"), *GRANITE_ROUTER),
        parameters=_mamba_parameters("mamba"),
        joined=(*GRANITE_EXPERTS, *input_and_output("shared_mlp", "")),
        row_order=rotated_pairs,
    ),
    "lfm2": Architecture(
        Family("lfm2", "Lfm2ForCausalLM", _LFM2, {"block_auto_adjust_ff_dim": False}, (layer_kinds(_CONVOLUTIONS),)),
        epsilon=_LFM2_EPSILON,
        modules=_LFM2_MODULES,
        outside=("model.embedding_norm",),
    ),
    "lfm2moe": Architecture(
        Family(
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
        epsilon=_LFM2_EPSILON,
        modules=(*_LFM2_MODULES, "feed_forward.gate"),
        parameters={
            "ffn_gate_exps.weight": "feed_forward.experts.*.w1.weight",
            "ffn_up_exps.weight": "feed_forward.experts.*.w3.weight",
            "ffn_down_exps.weight": "feed_forward.experts.*.w2.weight",
            "exp_probs_b.bias": "feed_forward.expert_bias",
        },
        outside=("model.embedding_norm",),
    ),
    "nemotron_h": Architecture(
        Family("nemotron_h", "NemotronHForCausalLM", _NEMOTRON, more=_NEMOTRON_RULES),
        heads=heads_without_rope,
        epsilon=_NEMOTRON_EPSILON,
        modules=_NEMOTRON_MODULES,
        parameters=_mamba_parameters("mixer"),
        outside=_NEMOTRON_OUTSIDE,
    ),
    "nemotron_h_moe": Architecture(
        Family("nemotron_h", "NemotronHForCausalLM", {**_NEMOTRON, **_NEMOTRON_EXPERTS}, more=_NEMOTRON_RULES),
        heads=heads_without_rope,
        epsilon=_NEMOTRON_EPSILON,
        modules=(
            *_NEMOTRON_MODULES,
            "mixer.gate",
            *(f"mixer.shared_experts.{name}" for name in ("up_proj", "down_proj")),
        ),
        parameters={
            **_mamba_parameters("mixer"),
            "ffn_up_exps.weight": "mixer.experts.*.up_proj.weight",
            "ffn_down_exps.weight": "mixer.experts.*.down_proj.weight",
            "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        },
        outside=_NEMOTRON_OUTSIDE,
    ),
    "qwen35": Architecture(
        Family("qwen3_5_text", "Qwen3_5ForCausalLM", _DELTA_NET, more=(*_QWEN_LAYERS, _sections), ignored=_SEEN),
        heads=heads_rotated_in_part,
        modules=_QWEN35_MODULES,
        parameters=_DELTA_PARAMETERS,
        row_order=value_head_rows,
        column_order=value_head_columns,
        norms_plus_one=True,
    ),
    "qwen35moe": Architecture(
        Family(
            "qwen3_5_moe_text",
            "Qwen3_5MoeForCausalLM",
            {**_DELTA_NET, **QWEN_EXPERTS},
            more=(*_QWEN_LAYERS, _sections),
            ignored=_SEEN,
        ),
        heads=heads_rotated_in_part,
        modules=(*_QWEN35_MODULES, *QWEN_MODULES),
        parameters=_DELTA_PARAMETERS,
        row_order=value_head_rows,
        column_order=value_head_columns,
        norms_plus_one=True,
    ),
    "qwen3next": Architecture(
        Family(
            "qwen3_next",
            "Qwen3NextForCausalLM",
            {**_DELTA_NET, **QWEN_EXPERTS},
            {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
            _QWEN_LAYERS,
            _SEEN,
        ),
        heads=heads_rotated_in_part,
        modules=(*_DELTA_MODULES, "linear_attn.in_proj_ba", *QWEN_MODULES),
        parameters=_DELTA_PARAMETERS,
        joined=(Joined("linear_attn.in_proj_qkvz.weight", ("attn_qkv.weight", "attn_gate.weight"), by_key_head),),
        norms_plus_one=True,
    ),
}
