"""Llamas made on the device: of random weights, and the demo target expanded. No checkpoint is written or read.

`load_model(folder, make_model=...)` takes them: the folder has the config alone. The peer gets the same weights.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from models.make.expand import ZERO_FILLED, Shape, expanded_config
from outrider.engine.attention.layer import ATTENTION_NAME, register_attention
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel

LLAMA_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128256,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    bos_token_id=0,
    eos_token_id=1,
    dtype="bfloat16",
)
LLAMA_1B = LlamaConfig(
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_position_embeddings=8192,
    tie_word_embeddings=True,
    bos_token_id=0,
    eos_token_id=1,
    dtype="bfloat16",
)
# Sixteen times the demo target's width, so that bf16 holds the rescaled norms exactly: 7.6 billion parameters.
EXPANDED = Shape(hidden_size=5120, num_layers=24, intermediate_size=13824, num_heads=80)
# (config's folder, dtype, device, attention's name) -> the model.
Make = Callable[[str, torch.dtype, torch.device, str], Any]


def random_llama(path: str, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """Weights as transformers initialises them, drawn on the device; the same ones each time."""
    config = AutoConfig.from_pretrained(path)
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def expanded_llama(source: Path, path: str, dtype: torch.dtype, device: torch.device, attention: str) -> Any:
    """The function of the Llama in `source` at the size of the config in `path`: what models.make.expand.expand
    makes, but in `dtype` on the device, where filling it takes no time."""
    small = LlamaForCausalLM.from_pretrained(source, dtype=torch.float32)
    old = small.state_dict()
    model = random_llama(path, dtype, device, attention)
    norm_scale = math.sqrt(small.config.hidden_size / model.config.hidden_size)
    for name, new in model.state_dict().items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        found = old.get(name)
        if name.endswith("norm.weight"):
            new.fill_(norm_scale)
            if found is not None:
                new[: len(found)] = (found * norm_scale).to(new)
            continue
        if name.endswith(ZERO_FILLED):
            new.zero_()
        if found is not None:
            new[: found.shape[0], : found.shape[1]] = found.to(new)
    return model


def expanded(source: Path, shape: Shape) -> tuple[LlamaConfig, Make]:
    """The expanded model's config, and what makes it."""
    config = expanded_config(LlamaConfig.from_pretrained(source), shape)
    config.dtype = "bfloat16"
    return config, functools.partial(expanded_llama, source)


def load_made(folder: Path, config: LlamaConfig, make: Make, device: torch.device, **options: Any) -> LoadedModel:
    """load_model over a made model, whose config is written to the folder."""
    config.save_pretrained(folder)
    register_attention()

    def make_model(path: str, dtype: torch.dtype, on: torch.device) -> Any:
        return make(path, dtype, on, ATTENTION_NAME)

    return load_model(str(folder), device=device.type, make_model=make_model, **options)


def streamed_bytes(config: LlamaConfig, itemsize: int = 2) -> int:
    """Bytes of weights that a forward reads whole: all but the embedding's rows, and the head even where it is tied."""
    width, head = config.hidden_size, config.head_dim
    attention = width * head * 2 * (config.num_attention_heads + config.num_key_value_heads)
    layer = attention + 3 * width * config.intermediate_size + 2 * width
    num_weights: int = config.num_hidden_layers * layer + width * (config.vocab_size + 1)
    return itemsize * num_weights
