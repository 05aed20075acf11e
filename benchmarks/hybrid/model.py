"""A random model of Qwen3.5's layout, of middle size: three recurrent layers to each that attends."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

_PERIOD = ("linear_attention", "linear_attention", "linear_attention", "full_attention")


def save_random_hybrid(folder: Path, num_layers: int, hidden_size: int) -> Path:
    """num_layers: a multiple of 4. hidden_size: a multiple of 128; heads of the published sizes, fewer of them."""
    torch.manual_seed(0)
    num_heads = hidden_size // 128
    config = Qwen3_5TextConfig(
        vocab_size=16_384,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        layer_types=list(_PERIOD) * (num_layers // len(_PERIOD)),
        num_attention_heads=num_heads,
        num_key_value_heads=max(1, num_heads // 4),
        head_dim=256,
        linear_num_key_heads=num_heads,
        linear_num_value_heads=2 * num_heads,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        max_position_embeddings=4096,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    return folder
