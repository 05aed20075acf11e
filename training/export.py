"""Writes a model as an HF folder: config, generation config, bf16 safetensors and tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, PreTrainedModel, Qwen3_5TextConfig

from outrider.training.demo.tokenizer import END_OF_TEXT, END_OF_TURN, SPECIAL_TOKENS, VOCAB_SIZE

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
STOP_IDS = [SPECIAL_TOKENS.index(END_OF_TEXT), SPECIAL_TOKENS.index(END_OF_TURN)]


def llama_config(hidden_size: int, num_layers: int, num_heads: int, intermediate_size: int) -> LlamaConfig:
    """A Llama of the demo family: heads of 64, no grouped queries, tied embeddings, 2,048 positions."""
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
    """The demo family's hybrid: Qwen3.5's layout, three layers with a gated delta net and one with attention."""
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
    _write_json(model_dir / "generation_config.json", generation)
    if tokenizer_dir is not None:
        copy_files(tokenizer_dir, model_dir, TOKENIZER_FILES)


def write_model(model: PreTrainedModel, model_dir: Path, dtype: torch.dtype) -> None:
    """Writes any causal LM's config, then its weights in `dtype`, renamed into place."""
    model_dir.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = model.config.to_diff_dict()
    config |= {"architectures": [type(model).__name__], "model_type": model.config.model_type}
    config |= {"dtype": str(dtype).removeprefix("torch.")}
    # In both styles: transformers 5 reads rope_parameters, older readers rope_theta.
    config |= {"rope_theta": (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)}
    config.pop("_name_or_path", None)
    _write_json(model_dir / "config.json", config)
    tensors = {
        name: tensor.detach().to(dtype).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    partial = model_dir / "model.safetensors.partial"
    save_file(tensors, str(partial), metadata={"format": "pt"})
    partial.chmod(0o644)  # save_file makes it private to the user; containers run as another one
    partial.rename(model_dir / "model.safetensors")


def copy_files(source_dir: Path, model_dir: Path, names: Sequence[str]) -> None:
    """Copies the existing files of `names`; does nothing when both folders are the same."""
    for name in names:
        if (source_dir / name).is_file() and source_dir.resolve() != model_dir.resolve():
            shutil.copyfile(source_dir / name, model_dir / name)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
