"""Tiny models of each architecture that is read from GGUF, with what distinguishes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gguf_writer import VOCABULARY, write_gguf
from tiny_models import SERVED, save_tiny_model

_WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
_GEMMA3 = {
    "sliding_window": 7,
    "num_hidden_layers": 7,
    "query_pre_attn_scalar": 32,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
# name -> (of SERVED, what differs, GGUF's architecture, metadata)
MODELS: dict[str, tuple[str, dict[str, Any], str, dict[str, Any]]] = {
    "llama": ("llama", {}, "llama", {"llama.rope.dimension_count": 32}),
    "llama-biases-tied": ("llama_tied", {}, "llama", {}),
    "llama3": ("llama", {"rope_parameters": _LLAMA3}, "llama", {}),
    "llama-linear": (
        "llama",
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
        "llama",
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0},
    ),
    "qwen2": ("qwen2", {"use_sliding_window": False, "layer_types": None}, "qwen2", {}),
    "qwen2-yarn": (
        "qwen2",
        {"use_sliding_window": False, "layer_types": None, "rope_parameters": _YARN},
        "qwen2",
        {
            "qwen2.rope.scaling.type": "yarn",
            "qwen2.rope.scaling.factor": 4.0,
            "qwen2.rope.scaling.original_context_length": 32,
        },
    ),
    "qwen3": ("qwen3", {}, "qwen3", {}),
    "mixtral": (
        "mixtral",
        {"sliding_window": None},
        "llama",
        {"llama.expert_count": 4, "llama.expert_used_count": 2},
    ),
    "qwen3moe": (
        "qwen3_moe",
        {"moe_intermediate_size": 64},
        "qwen3moe",
        {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 64},
    ),
    "gemma3": (
        "gemma3_text",
        _GEMMA3,
        "gemma3",
        {
            "gemma3.attention.sliding_window": 7,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    ),
}


def gguf_model(
    folder: Path,
    name: str,
    kind: str,
    metadata: dict[str, Any] | None = None,
    other_kinds: dict[str, str] | None = None,
) -> tuple[Path, Path]:
    """(the checkpoint, its GGUF file); the arguments are write_gguf's."""
    served, changes, architecture, own_metadata = MODELS[name]
    config, arguments = SERVED[served]
    arguments = {**arguments, **_WIDTHS, **changes, "vocab_size": len(VOCABULARY)}
    plain = save_tiny_model(config, arguments, folder / "original")
    all_metadata = own_metadata | (metadata or {})
    return plain, write_gguf(plain, folder / "model.gguf", architecture, kind, all_metadata, other_kinds)
