"""What GGUF's tensors are called in transformers' checkpoints, by architecture.

Not here: parameters that are several tensors (joined), what the converter changed in a tensor (undone).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.engine.model.gguf.rope import LONGROPE_FACTORS


@dataclass(frozen=True)
class Names:
    """modules: part of the tensor's name -> module in its layer, * for each expert's number; before those of all
    architectures. parameters: whole name in its layer -> parameter there, where that is no module's weight or bias.
    outside: tensors of no layer. in_config: those that are no parameter, since the config has what they say."""

    modules: Mapping[str, str] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    outside: Mapping[str, str] = field(default_factory=dict)
    in_config: frozenset[str] = frozenset()


OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
IN_CONFIG = frozenset({"rope_freqs.weight"})


def _experts(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> dict[str, str]:
    """module: that has the router and the experts."""
    return {
        "ffn_gate_inp": f"{module}.gate",
        "ffn_gate_exps": f"{module}.experts.*.{gate}",
        "ffn_up_exps": f"{module}.experts.*.{up}",
        "ffn_down_exps": f"{module}.experts.*.{down}",
    }


def _shared(module: str) -> dict[str, str]:
    return {
        "ffn_gate_shexp": f"{module}.gate_proj",
        "ffn_up_shexp": f"{module}.up_proj",
        "ffn_down_shexp": f"{module}.down_proj",
    }


def _mamba(module: str) -> Names:
    """Mamba-2."""
    return Names(
        {
            "ssm_in": f"{module}.in_proj",
            "ssm_conv1d": f"{module}.conv1d",
            "ssm_norm": f"{module}.norm",
            "ssm_out": f"{module}.out_proj",
        },
        {"ssm_a": f"{module}.A_log", "ssm_d": f"{module}.D", "ssm_dt.bias": f"{module}.dt_bias"},
    )


_EXPERTS = _experts("mlp")
_MIXTRAL_EXPERTS = _experts("block_sparse_moe", "w1", "w3", "w2")
_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
# DeepSeek-V3's form of experts.
_DEEPSEEK = {**_EXPERTS, **_shared("mlp.shared_experts")}
_AFTER_ATTENTION = {"post_attention_norm": "post_attention_layernorm"}
_AROUND = {**_AFTER_ATTENTION, "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {**_AROUND, "ffn_norm": "pre_feedforward_layernorm"}
# Embeddings for each layer: Gemma 3n and 4.
_PER_LAYER = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_PER_LAYER_OUTSIDE = {
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
_GATED_DELTA = {
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **_AFTER_ATTENTION,
}
_GATED_DELTA_PARAMETERS = {"ssm_a": "linear_attn.A_log", "ssm_dt.bias": "linear_attn.dt_bias"}
_QWEN35 = {
    **_GATED_DELTA,
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
}
_QWEN_EXPERTS = {**_EXPERTS, **_shared("mlp.shared_expert"), "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
}
_LFM2_OUTSIDE = {"token_embd_norm.weight": "model.embedding_norm.weight"}
_GRANITE_ROUTER = {"ffn_gate_inp": "block_sparse_moe.router.layer"}
_NEMOTRON = Names(
    {
        **_mamba("mixer").modules,
        "attn_norm": "norm",
        "attn_q": "mixer.q_proj",
        "attn_k": "mixer.k_proj",
        "attn_v": "mixer.v_proj",
        "attn_output": "mixer.o_proj",
        **_experts("mixer"),
        "ffn_up": "mixer.up_proj",
        "ffn_down": "mixer.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
    {**_mamba("mixer").parameters, "exp_probs_b.bias": "mixer.gate.e_score_correction_bias"},
    {"token_embd.weight": "model.embeddings.weight", "output_norm.weight": "model.norm_f.weight"},
)

NAMES: Mapping[str, Names] = {
    "deepseek2": Names(
        {
            **_DEEPSEEK,
            "attn_q_a": "self_attn.q_a_proj",
            "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj",
            "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm",
            "attn_kv_b": "self_attn.kv_b_proj",
        },
        _CORRECTION,
    ),
    "dots1": Names(_DEEPSEEK, _CORRECTION),
    "ernie4_5-moe": Names(_DEEPSEEK, {"exp_probs_b.bias": "mlp.moe_statics.e_score_correction_bias"}),
    "exaone4": Names(_AROUND),
    "falcon-h1": Names(
        {
            **_mamba("mamba").modules,
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
        {**_mamba("mamba").parameters, "ffn_norm": "pre_ff_layernorm.weight"},
        {"output_norm.weight": "model.final_layernorm.weight"},
    ),
    "gemma2": Names(_GEMMA),
    "gemma3": Names(_GEMMA),
    "gemma3n": Names(
        {
            **_GEMMA,
            **_PER_LAYER,
            "altup_correct_coef": "altup.correction_coefs",
            "altup_predict_coef": "altup.prediction_coefs",
            "altup_router": "altup.modality_router",
            "altup_router_norm": "altup.router_norm",
            "laurel_l": "laurel.linear_left",
            "laurel_r": "laurel.linear_right",
            "laurel_post_norm": "laurel.post_laurel_norm",
        },
        {"altup_correct_scale.weight": "altup.correct_output_scale"},
        {
            **_PER_LAYER_OUTSIDE,
            "altup_proj.weight": "model.altup_projections.*.weight",
            "altup_unembd_proj.weight": "model.altup_unembed_projections.*.weight",
        },
    ),
    "gemma4": Names(
        {
            **_GEMMA,
            **_PER_LAYER,
            "ffn_gate_inp": "router.proj",
            "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
            "post_ffw_norm_1": "post_feedforward_layernorm_1",
            "post_ffw_norm_2": "post_feedforward_layernorm_2",
        },
        {
            "layer_output_scale.weight": "layer_scalar",
            "ffn_gate_inp.scale": "router.scale",
            "ffn_down_exps.scale": "router.per_expert_scale",
        },
        _PER_LAYER_OUTSIDE,
    ),
    "glm4": Names(
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            "ffn_up": "mlp.gate_up_proj",
        }
    ),
    "glm4moe": Names({**_DEEPSEEK, **_AFTER_ATTENTION}, _CORRECTION),
    "gpt-oss": Names({**_AFTER_ATTENTION, "ffn_gate_inp": "mlp.router"}, {"attn_sinks.weight": "self_attn.sinks"}),
    "granitehybrid": Names({**_mamba("mamba").modules, **_GRANITE_ROUTER}, _mamba("mamba").parameters),
    "granitemoe": Names(_GRANITE_ROUTER),
    "hunyuan-dense": Names({"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}),
    "lfm2": Names(_LFM2, outside=_LFM2_OUTSIDE),
    "lfm2moe": Names(
        {**_LFM2, **_experts("feed_forward", "w1", "w3", "w2")},
        {"exp_probs_b.bias": "feed_forward.expert_bias"},
        _LFM2_OUTSIDE,
    ),
    "llama": Names(_MIXTRAL_EXPERTS),
    "minimax-m2": Names(_MIXTRAL_EXPERTS, {"exp_probs_b.bias": "block_sparse_moe.e_score_correction_bias"}),
    "nemotron_h": _NEMOTRON,
    "nemotron_h_moe": _NEMOTRON,
    "olmo2": Names(_AROUND),
    "olmoe": Names(_EXPERTS),
    "phi3": Names({"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}, in_config=LONGROPE_FACTORS),
    "qwen2moe": Names(_QWEN_EXPERTS),
    "qwen35": Names(_QWEN35, _GATED_DELTA_PARAMETERS),
    "qwen35moe": Names({**_QWEN35, **_QWEN_EXPERTS}, _GATED_DELTA_PARAMETERS),
    "qwen3moe": Names(_EXPERTS),
    "qwen3next": Names({**_GATED_DELTA, "ssm_ba": "linear_attn.in_proj_ba", **_QWEN_EXPERTS}, _GATED_DELTA_PARAMETERS),
    "seed_oss": Names(_AFTER_ATTENTION),
    "starcoder2": Names(
        {"ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, outside={"output_norm.bias": "model.norm.bias"}
    ),
}
