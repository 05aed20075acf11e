"""The shapes of the demo family, and the export of its models."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3_5TextConfig

from models.make.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, VOCAB_SIZE
from outrider.training.export import TOKENIZER_FILES, copy_files, write_json, write_model

STOP_IDS = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END_OF_TURN)]


def llama_config(hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int) -> LlamaConfig:
    """Returns the config of a demo Llama: heads of 64, no grouped queries, tied embeddings, 2,048 positions."""
    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=64,
        max_position_embeddings=2048,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=STOP_IDS[0],
        eos_token_id=STOP_IDS,
        pad_token_id=STOP_IDS[0],
    )


def hybrid_config() -> Qwen3_5TextConfig:
    """Returns the config of the demo family's hybrid.

    It has Qwen3.5's layout: three layers with a gated delta net and one with attention.
    """
    return Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=160,
        intermediate_size=416,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=True,
        bos_token_id=STOP_IDS[0],
        eos_token_id=STOP_IDS,
        pad_token_id=STOP_IDS[0],
    )


def export_model(model: PreTrainedModel, model_dir: Path, tokenizer_dir: Path | None) -> None:
    """Writes a model of the demo family in bf16 to `model_dir`, with the tokenizer files from `tokenizer_dir`."""
    write_model(model, model_dir, torch.bfloat16)
    generation = {"bos_token_id": STOP_IDS[0], "eos_token_id": STOP_IDS, "pad_token_id": STOP_IDS[0]}
    write_json(model_dir / "generation_config.json", generation)
    if tokenizer_dir is not None:
        copy_files(tokenizer_dir, model_dir, TOKENIZER_FILES)
