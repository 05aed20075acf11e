"""Tiny random checkpoints of multimodal models whose causal class is that of their text part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine.tiny_models import HYBRIDS, SERVED

_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 80,
    "num_position_embeddings": 16,
}
_LLAMA_VISION = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
# config and model class, text and vision config
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama4": ("Llama4Config", "Llama4ForConditionalGeneration", SERVED["llama4"][1], _LLAMA_VISION),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", HYBRIDS["qwen3_5"][1], _QWEN_VISION),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        HYBRIDS["qwen3_5_moe"][1],
        _QWEN_VISION,
    ),
}


@torch.inference_mode()
def save_multimodal(name: str, folder: Path) -> Path:
    random_model(name).save_pretrained(folder)
    return folder


def random_model(name: str) -> Any:
    config_name, class_name, text, vision = MODELS[name]
    config = getattr(transformers, config_name)(text_config=text, vision_config=vision)
    torch.manual_seed(3)
    model = getattr(transformers, class_name)._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn(parameter.shape))
    return model
