"""The grid's models: the demo pair in both dtypes, random checkpoints of three other architectures, two packed ones.

The random ones have the demo's vocabulary and tokenizer (grammars need one). Their drafts are the same weights plus
noise: near enough to be accepted now and then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.model.quantised.packed_writers import CASES, write_model

_DEMO = Path(__file__).parents[2] / "models"
TOKENIZER_FOLDER = _DEMO / "demo-target"
_DRAFT_NOISE = 0.03
# Random logits are nearly flat over 4,096 tokens; sharper ones give drafts, and near ties, something to decide.
_HEAD_SCALE = 3.0
# Widths that are no multiples of a vector, and a window that every prompt is longer than.
_COMMON: dict[str, Any] = {
    "vocab_size": 4096,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "hidden_size": 80,
    "intermediate_size": 100,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 20,
    "sliding_window": 23,
}
_GEMMA2 = {**_COMMON, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 15.0}
_MIXTRAL = {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2}
# Chunks that every prompt crosses, and a query's scale that changes within every output.
_LLAMA4 = {
    **{name: size for name, size in _MIXTRAL.items() if name != "sliding_window"},
    "intermediate_size_mlp": 100,
    "no_rope_layers": [1, 0],
    "moe_layers": [1],
    "attention_chunk_size": 23,
    "floor_scale": 16,
    "attn_scale": 0.5,
}


@dataclass(frozen=True)
class GridModel:
    """`dtype` as load_model takes it; `kv_cache_dtype` too, of the target."""

    target: Path
    draft: Path
    dtype: str
    kv_cache_dtype: str = "auto"


def _demo(dtype: str) -> GridModel:
    return GridModel(_DEMO / "demo-target", _DEMO / "demo-draft", dtype)


_MISTRAL = {**_COMMON, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
# A target with recurrent layers, and a draft with its weights plus noise.
_QWEN35 = {
    **_COMMON,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
}
HYBRID_NAME = "qwen35-float32"
_CONFIGS: dict[str, Callable[[], transformers.PretrainedConfig]] = {
    "gemma2": lambda: transformers.Gemma2Config(**_GEMMA2),
    "mixtral": lambda: transformers.MixtralConfig(**_MIXTRAL),
    "llama4": lambda: transformers.Llama4TextConfig(**_LLAMA4),
}
# Whose target is packed, as a case of packed_writers; the draft has its weights plus noise, plain.
_PACKED: dict[str, tuple[transformers.PretrainedConfig, str]] = {
    "gptq": (transformers.MistralConfig(**_MISTRAL), "gptq-4-v2-act-order"),
    "w5": (transformers.MistralConfig(**_MISTRAL), "ct-w5a16"),
    "w6": (transformers.MistralConfig(**_MISTRAL), "ct-w6a16"),
    "w8": (transformers.MistralConfig(**_MISTRAL), "ct-w8a8"),
    "fp8": (transformers.MistralConfig(**_MISTRAL), "fp8-block"),
    "awqmoe": (transformers.MixtralConfig(**_MISTRAL, num_local_experts=4, num_experts_per_tok=2), "awq"),
}
MODEL_NAMES = (
    "demo-bfloat16",
    "demo-float32",
    "gemma2-bfloat16",
    "mixtral-float32",
    "gptq-bfloat16",
    "w5-bfloat16",
    "w6-bfloat16",
    "w8-bfloat16",
    "fp8-bfloat16",
    "llama4-float32",
    "awqmoe-bfloat16",
    "demo-bfloat16-int8",
    "gemma2-bfloat16-fp8",
    "llama4-float32-int8",
)


def grid_model(name: str, folder: Path) -> GridModel:
    """Random checkpoints are written below `folder`. name: family-dtype, or family-dtype-type of the KV cache."""
    family, dtype, *kv_cache_dtype = name.split("-")
    model = _plain_cache(f"{family}-{dtype}", folder)
    return replace(model, kv_cache_dtype=kv_cache_dtype[0]) if kv_cache_dtype else model


def _plain_cache(name: str, folder: Path) -> GridModel:
    if name.startswith("demo-"):
        return _demo(name.removeprefix("demo-"))
    family, dtype = name.split("-")
    target, draft = folder / family, folder / f"{family}-draft"
    if draft.exists():
        return GridModel(target, draft, dtype)
    if family in _PACKED:
        config, case = _PACKED[family]
        plain = folder / f"{family}-plain"
        _save(config, plain, 0.0)
        write_model(plain, CASES[case], target, draft)
        _add_noise(draft / "model.safetensors")
        return GridModel(target, draft, dtype)
    if name == HYBRID_NAME:
        _save(transformers.Qwen3_5TextConfig(**_QWEN35), target, 0.0)
        _save(transformers.Qwen3_5TextConfig(**_QWEN35), draft, _DRAFT_NOISE)
        return GridModel(target, draft, dtype)
    config = _CONFIGS[family]()
    _save(config, target, 0.0)
    _save(config, draft, _DRAFT_NOISE)
    return GridModel(target, draft, dtype)


def _add_noise(file: Path) -> None:
    generator = torch.Generator().manual_seed(8)
    tensors = load_file(file)
    for tensor in tensors.values():
        tensor += _DRAFT_NOISE * tensor.std(correction=0) * torch.randn(tensor.shape, generator=generator)
    save_file(tensors, file, {"format": "pt"})


@torch.no_grad()
def _save(config: transformers.PretrainedConfig, folder: Path, noise: float) -> None:
    """Every weight is random, biases and norms too; `noise` is the relative distance to the target's weights."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator, other = torch.Generator().manual_seed(7), torch.Generator().manual_seed(8)
    for parameter in model.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        drawn += noise * torch.randn(parameter.shape, generator=other)
        if parameter.ndim == 1:
            parameter.add_(0.1 * drawn)
        else:
            parameter.copy_(drawn / parameter.shape[-1] ** 0.5)
    model.get_output_embeddings().weight.mul_(_HEAD_SCALE)
    model.save_pretrained(folder)
    shutil.copy(TOKENIZER_FOLDER / "tokenizer.json", folder)
