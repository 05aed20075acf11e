"""Tiny models and data that the tests of head training share: real Llamas with random weights, saved as checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.training.export import copy_files, write_model
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.interface import Batch, TargetView
from outrider.training.heads.options import METHODS

# Methods that train for any target; for mtp, see test_mtp.py.
HEAD_METHODS = tuple(method for method in METHODS if method != "mtp")
VOCAB_SIZE = 48
NUM_LAYERS = 6
TOKENIZER_DIR = Path(__file__).parents[2] / "models" / "demo-target"


def tiny_llama(seed: int = 0) -> LlamaForCausalLM:
    """Six layers of width 32 with weights large enough that its laws are not flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.25)
    return model


def write_target(path: Path) -> Path:
    """A target checkpoint in float32."""
    write_model(tiny_llama(), path, torch.float32)
    copy_files(TOKENIZER_DIR, path, ("tokenizer.json", "tokenizer_config.json"))
    return path


def write_rows(path: Path, num_rows: int = 64, length: int = 24, seed: int = 1) -> Path:
    """A .npy of rows with something to learn: each row repeats a short random phrase."""
    rng = np.random.default_rng(seed)
    phrases = rng.integers(0, VOCAB_SIZE, (num_rows, 5))
    np.save(path, np.tile(phrases, (1, -(-length // 5)))[:, :length].astype(np.uint16))
    return path


def tiny_batch(target: FrozenTarget, num_rows: int, length: int, layers: tuple[int, ...]) -> tuple[Batch, TargetView]:
    """A batch with ragged counts and the target's view of it: row b counts from token b on, the last ends early."""
    generator = torch.Generator().manual_seed(3)
    token_ids = torch.randint(0, VOCAB_SIZE, (num_rows, length), generator=generator)
    counts = torch.ones(num_rows, length, dtype=torch.bool)
    for row in range(num_rows):
        counts[row, :row] = False
    counts[-1, length - 3 :] = False
    return Batch(token_ids, counts), target.view(token_ids, layers)
