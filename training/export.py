"""Writes a model as an HF folder: config, safetensors and tokenizer files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def write_model(model: PreTrainedModel, model_dir: Path, dtype: torch.dtype) -> None:
    """Writes any causal LM's config, then its weights in `dtype`, renamed into place."""
    model_dir.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = model.config.to_diff_dict()
    config |= {"architectures": [type(model).__name__], "model_type": model.config.model_type}
    config |= {"dtype": str(dtype).removeprefix("torch.")}
    # Written in both styles: transformers 5 reads rope_parameters, older readers rope_theta.
    config |= {"rope_theta": (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)}
    config.pop("_name_or_path", None)
    write_json(model_dir / "config.json", config)
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


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes indented JSON with sorted keys."""
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")
