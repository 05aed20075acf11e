"""Quantised checkpoints for tensor parallelism, and a rank's share of one, cut and packed without other ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.model import guards
from outrider.engine.model.coded_weights import RowInvariantCodes
from outrider.engine.model.row_invariance import make_row_invariant
from outrider.engine.model.row_kernels import resolve_code_kernels
from outrider.engine.model.weights import read_weights
from outrider.engine.tensor_parallel.sharding import cut_model
from tests.engine.latent_models import LATENT_MODELS
from tests.engine.model.gguf.gguf_writer import VOCABULARY, write_gguf
from tests.engine.model.quantised.packed_writers import CASES, LINEAR, write_model
from tests.engine.tiny_models import SERVED, save_tiny_model

# Two ranks have whole panels of 64 outputs each, so that nothing is padded.
WIDTHS = {"hidden_size": 128, "intermediate_size": 384, "moe_intermediate_size": 128, "head_dim": 64}
# Rows of whole blocks of 256 for each rank.
_GGUF_WIDTHS = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 512, "head_dim": 64}
# architecture -> (GGUF's, metadata, what differs)
_GGUF_MODELS: dict[str, tuple[str, dict[str, int], dict[str, Any]]] = {
    "llama": ("llama", {"llama.rope.dimension_count": 64}, {}),
    "mixtral": ("llama", {"llama.expert_count": 4, "llama.expert_used_count": 2}, {"sliding_window": None}),
    "qwen3_moe": (
        "qwen3moe",
        {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2, "qwen3moe.expert_feed_forward_length": 512},
        {},
    ),
}
NUM_RANKS = 2


def packed_checkpoint(
    folder: Path, architecture: str, case: str, weights: str = LINEAR, widths: Mapping[str, int] = WIDTHS
) -> Path:
    """In `packed`; with the weights that were meant in `meant`. weights: the names of those to pack."""
    config, arguments = (SERVED | LATENT_MODELS)[architecture]
    plain = save_tiny_model(config, {**arguments, **widths}, folder / "plain")
    write_model(plain, CASES[case], folder / "packed", folder / "meant", weights)
    return folder / "packed"


def gguf_file(folder: Path, architecture: str, kind: str) -> Path:
    """Of one type's matrices, but for its embedding, which has eight bits."""
    config, arguments = SERVED[architecture]
    name, metadata, changes = _GGUF_MODELS[architecture]
    arguments = {**arguments, **_GGUF_WIDTHS, **changes, "vocab_size": len(VOCABULARY)}
    plain = save_tiny_model(config, arguments, folder / "plain")
    return write_gguf(plain, folder / "model.gguf", name, kind, metadata, {"token_embd": "Q8_0"})


def packed_share(path: str, rank: int | None) -> dict[str, Any]:
    """By name, the linears of one rank's share, and its experts; rank None: of the whole model."""
    config = guards.read_config(path)
    # In bf16, where a row with a single 1 brings out weights exactly.
    kernels = resolve_code_kernels("cpu", torch.bfloat16, torch.device("cpu"), "bf16")
    model = read_weights(path, config, torch.bfloat16, torch.device("cpu"), code_kernels=kernels)
    ops = resolve_attention_ops("cpu", torch.device("cpu"))
    shapes = guards.probe_layers(path, model, ops, guards.attention_layers(config))
    if rank is not None:
        cut_model(path, model, shapes, rank, NUM_RANKS)
    make_row_invariant(model)
    return {name: part for name, part in model.named_modules() if isinstance(part, RowInvariantCodes)}


def weights_of(linear: Any) -> torch.Tensor:
    """[K, N], each rounded once: a row with a single 1 brings out an input's weights."""
    found: torch.Tensor = linear(torch.eye(linear.in_features, dtype=torch.bfloat16))
    return found
