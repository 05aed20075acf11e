"""Tiny models with latent attention, besides those of tiny_models: the families' rotations, scales, projections."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import SERVED

_MOE: dict[str, Any] = SERVED["deepseek_v2"][1]
_DENSE: dict[str, Any] = {
    name: value for name, value in _MOE.items() if not name.startswith(("n_", "topk", "moe", "first_k", "num_experts"))
}
# 32 heads over one key: more than the attention kernel takes at a time. Queries and keys are scaled by yarn.
_DEEPSEEK_V3: dict[str, Any] = {
    **_MOE,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "max_position_embeddings": 128,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
}

# Fewer keys than the tests have tokens; some heads at zero, but never all eight.
_INDEXER: dict[str, Any] = {"index_topk": 6, "index_n_heads": 8, "index_head_dim": 20}

LATENT_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepseek_v3": ("DeepseekV3Config", _DEEPSEEK_V3),
    "deepseek_v32": ("DeepseekV32Config", {**_MOE, **_INDEXER, "mlp_layer_types": ["dense", "sparse"]}),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **_MOE,
            **_INDEXER,
            "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "dense"],
            "indexer_types": ["full", "shared", "full"],
        },
    ),
    "dots3_note_text": (
        "Dots3NoteTextConfig",
        {
            **_MOE,
            **_INDEXER,
            "num_hidden_layers": 4,
            "head_dim": 20,
            "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
            "shared_experts_intermediate_size": 36,
            "sliding_window": 5,
            "swa_num_attention_heads": 2,
            "swa_num_key_value_heads": 2,
            "swa_q_lora_rank": 24,
            "swa_kv_lora_rank": 32,
            "swa_head_dim": 20,
            "swa_qk_nope_head_dim": 12,
            "swa_v_head_dim": 16,
        },
    ),
    "axk1": ("AXK1Config", _MOE),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", {**_MOE, "mlp_layer_types": ["dense", "sparse"]}),
    "minicpm3": ("MiniCPM3Config", _DENSE),
    # Queries without a latent of their own.
    "youtu": ("YoutuConfig", {**_DENSE, "q_lora_rank": None}),
}
# One in the usual tests, beside tiny_models' deepseek_v2 and kimi_linear.
LATENT_PARAMS = [
    pytest.param(name, marks=() if name in ("deepseek_v3", "glm_moe_dsa") else pytest.mark.storm)
    for name in LATENT_MODELS
]
