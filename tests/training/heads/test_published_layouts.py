"""What `outrider train` writes has the names, shapes and settings that vLLM's loaders read.

The table is vLLM 0.32's, copied from its modules by hand, without this project's readers: a tensor that it has no place
for is ignored there or refused, and one that it misses stays uninitialised.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.registry import build_objective
from tests.training.tiny import VOCAB_SIZE, write_target

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]
# Of tiny.py's target.
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 32, 48, 4, 2, 8


@dataclass(frozen=True)
class Layout:
    """shapes: of every tensor that vLLM's modules have. settings: that decide about them, or about the loader."""

    shapes: Shapes
    settings: Config
    absent: tuple[str, ...] = ()
    options: Config = field(default_factory=dict)


def decoder_layer(width: int) -> Shapes:
    """width: of what q, k and v are projected from. No biases: see `settings`."""
    attention = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, width),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, width),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
    }
    mlp = {
        "mlp.gate_proj.weight": (INNER, HIDDEN),
        "mlp.up_proj.weight": (INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
    }
    return attention | mlp | {"post_attention_layernorm.weight": (HIDDEN,)}


def layer_zero(width: int, norms: tuple[str, ...] = ()) -> Shapes:
    layer = decoder_layer(width) | {f"{name}.weight": (HIDDEN,) for name in norms}
    return {f"layers.0.{name}": shape for name, shape in layer.items()}


DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB_SIZE,
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
}
# llama_eagle.py: fc without bias, no norm before the first layer; its attention has a bias where `attention_bias` or
# `bias` is true. Embedding and output head are the target's where the file has none.
EAGLE = {"fc.weight": (HIDDEN, 2 * HIDDEN)} | layer_zero(HIDDEN)
LAYOUTS = {
    "eagle": Layout(
        EAGLE,
        # EAGLEConfig puts "Eagle" before the architecture, and the registry has EagleLlamaForCausalLM.
        DECODER | {"architectures": ["LlamaForCausalLM"], "bias": False},
        options={"save_embedding": False},
    ),
    "eagle, with an embedding": Layout(EAGLE | {"embed_tokens.weight": (VOCAB_SIZE, HIDDEN)}, {"bias": False}),
    # fc.bias has no place in vLLM's module, which leaves it out; `bias` would add four others.
    "eagle, with a bias": Layout(
        EAGLE | {"fc.bias": (HIDDEN,)},
        {"attention_bias": False},
        absent=("bias",),
        options={"save_embedding": False, "fc_bias": True},
    ),
    # llama_eagle3.py behind the speculators format; offsets and known tokens of a reduced vocabulary.
    "eagle3": Layout(
        {"fc.weight": (HIDDEN, 3 * HIDDEN), "norm.weight": (HIDDEN,), "lm_head.weight": (16, HIDDEN)}
        | {"d2t": (16,), "t2d": (VOCAB_SIZE,)}
        | layer_zero(2 * HIDDEN, ("input_layernorm", "hidden_norm")),
        {
            "speculators_model_type": "eagle3",
            "draft_vocab_size": 16,
            "target_hidden_size": HIDDEN,
            "norm_before_residual": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5],
        },
        options={"save_embedding": False, "draft_vocab_size": 16, "feature_layers": (1, 3, 5)},
    ),
    # medusa.py: one output head for all blocks where `original_lm_head` is true, of `truncated_vocab_size` rows.
    "medusa": Layout(
        {f"blocks.{head}.layers.{layer}.weight": (HIDDEN, HIDDEN) for head in range(3) for layer in range(2)}
        | {f"blocks.{head}.layers.{layer}.bias": (HIDDEN,) for head in range(3) for layer in range(2)}
        | {"lm_head.weight": (VOCAB_SIZE, HIDDEN)},
        {
            "model_type": "medusa",
            "architectures": ["MedusaModel"],
            "hidden_size": HIDDEN,
            "vocab_size": VOCAB_SIZE,
            "truncated_vocab_size": VOCAB_SIZE,
            "num_heads": 3,
            "num_hidden_layers": 2,
            "original_lm_head": True,
            "medusa_fc_bias": True,
        },
        options={"num_heads": 3, "num_layers": 2},
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget(write_target(tmp_path_factory.mktemp("layouts") / "target"), torch.float32)


@pytest.mark.parametrize("name", LAYOUTS)
def test_vllm_has_a_place_for_every_tensor_and_a_tensor_for_every_place(
    name: str, target: FrozenTarget, tmp_path: Path
) -> None:
    layout, method = LAYOUTS[name], name.split(",")[0]
    counts = np.arange(VOCAB_SIZE, 0, -1)
    objective = build_objective(method, HeadOptions(**layout.options), target, counts, seed=0)
    objective.export(tmp_path, torch.bfloat16, "demo-target")
    found = {tensor: tuple(value.shape) for tensor, value in load_file(tmp_path / "model.safetensors").items()}
    assert found == layout.shapes
    config: Config = json.loads((tmp_path / "config.json").read_text())
    config = config | config.pop("transformer_layer_config", {})
    assert {key: config.get(key) for key in layout.settings} == layout.settings
    assert not config.keys() & set(layout.absent)
