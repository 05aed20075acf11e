"""Tiny random checkpoints of multimodal models, of each type whose text part is served."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from outrider.engine.model.text_part import WRAPPERS
from tests.engine.architecture_survey import tiny_arguments
from tests.engine.tiny_models import HYBRIDS, SERVED

_HIDDEN = 80
_QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": _HIDDEN,
    "num_position_embeddings": 16,
}
_LLAMA_VISION = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
# Their causal class is that of their text part: config and model class, text and vision config.
OWN_CLASS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "llama4": ("Llama4Config", "Llama4ForConditionalGeneration", SERVED["llama4"][1], _LLAMA_VISION),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration", HYBRIDS["qwen3_5"][1], _QWEN_VISION),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        "Qwen3_5MoeForConditionalGeneration",
        HYBRIDS["qwen3_5_moe"][1],
        _QWEN_VISION,
    ),
}
# Each of two key/value heads chooses 4 blocks of 5 keys.
MINIMAX_M3 = {
    "layer_types": ["full_attention", "minimax_m3_sparse"],
    "index_n_heads": 2,
    "index_head_dim": 20,
    "index_block_size": 5,
    "index_topk_blocks": 4,
}
# Wrappers, some with a text model that is not their default.
MODELS = sorted({*OWN_CLASS, *WRAPPERS, "mistral3 ministral3", "mistral3 mistral4", "llava mistral"})
# The smallest sizes of the other parts, by every name that their configs have for them.
_OTHER_PARTS = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "out_hidden_size", "projection_dim", "encoder_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers", "num_layers", "depths"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads"), 2),
    "num_position_embeddings": 16,
    "vocab_size": 64,
}
# weights; larger ones are of other parts, and stay as transformers draws them
_MOST_NOISE = 3_000_000


@torch.inference_mode()
def save_multimodal(name: str, folder: Path) -> Path:
    return save_as_published(random_model(name), folder)


def save_as_published(model: Any, folder: Path) -> Path:
    """With the names of the published files, which transformers reads, and but for Kimi-K2.5 also writes."""
    model.save_pretrained(folder)
    if model.config.model_type == "kimi_k25":  # its rule for the image part's blocks also renames the text layers
        file = folder / "model.safetensors"
        tensors = {name.replace("model.blocks.", "model.layers."): part for name, part in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    return folder


def random_model(name: str, **changes: Any) -> Any:
    """changes: of the text config."""
    config, class_name = _own_class(name) if name in OWN_CLASS else (_wrapper(name), "")
    for key, value in changes.items():
        setattr(config.get_text_config(decoder=True), key, value)
    model_class = getattr(transformers, class_name) if class_name else MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    torch.manual_seed(3)
    model = model_class._from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        if parameter.numel() < _MOST_NOISE:
            parameter.add_(0.1 * torch.randn(parameter.shape))
    return model


def _own_class(name: str) -> tuple[Any, str]:
    config_name, class_name, text, vision = OWN_CLASS[name]
    return getattr(transformers, config_name)(text_config=text, vision_config=vision), class_name


def _wrapper(name: str) -> Any:
    """name: the wrapper's type, and that of its text model if it is not the default."""
    wrapper, _, text_type = name.partition(" ")
    config_class = CONFIG_MAPPING[wrapper]
    default = config_class()
    text = CONFIG_MAPPING[text_type]() if text_type else default.get_text_config(decoder=True)
    arguments = {}
    for key in config_class.sub_configs:
        part = getattr(default, key, None)
        if part is not None:
            is_text = part is default.get_text_config(decoder=True)
            arguments[key] = _text_arguments(text) if is_text else _other_arguments(part)
    return config_class(**arguments)


def _text_arguments(config: Any) -> dict[str, Any]:
    arguments = tiny_arguments(config)
    rope = config.to_dict().get("rope_parameters")
    if isinstance(rope, dict) and ("mrope_section" in rope or config.model_type.startswith(("glm", "qwen2_"))):
        head_dim = arguments.get("head_dim") or arguments["hidden_size"] // arguments["num_attention_heads"]
        pairs = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
        arguments["rope_parameters"] = {**rope, "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]}
    if config.model_type == "mistral4":  # half of a head is rotated
        arguments |= {"head_dim": 16, "qk_head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8}
    if config.model_type == "step3p5":  # sliding layers have heads of their own number
        kinds = ["full_attention", "sliding_attention"]
        arguments |= {"sliding_window": 7, "layer_types": kinds, "num_sliding_attention_heads": 8}
    return {**arguments, "model_type": config.model_type}


def _other_arguments(config: Any) -> dict[str, Any]:
    fields = config.to_dict()
    sizes = {key: size for key, size in _OTHER_PARTS.items() if isinstance(fields.get(key), int)}
    if config.model_type.startswith("dots3_note_"):
        sizes |= {"adapter_out_dim": _HIDDEN, "adapter_in_dim": 32, "adapter_input_size": 32}
        sizes |= {"mlp_layer_types": ["dense"]} if "mlp_layer_types" in fields else {}
    return {**sizes, "model_type": config.model_type}


@torch.inference_mode()
def save_minimax_m3(folder: Path, **changes: Any) -> Any:
    """Returns transformers' whole model, whose text part is tested."""
    model = random_model("minimax_m3_vl", **MINIMAX_M3 | changes)
    for name, parameter in model.named_parameters():
        if "indexer" in name or "embed" in name:  # so that layers differ in what they choose
            parameter.mul_(3)
    save_as_published(model, folder)
    return model
