"""Architecture: the record of all that is particular to one architecture of GGUF files, its tensors' names included.

Which tensor of the file is which module of transformers' model is the converter's knowledge, and comes from its own
table (gguf.tensor_mapping). A record says which modules its layers have besides MODULES, and what that table lacks. Not
here: the records (dense, gemma, mixtures, hybrids), parameters of several tensors (joined), what the converter changed
in a tensor (undone).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.engine.model.gguf.family import Rules, plain_heads
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.joined import Joined

# Where the rows, or columns, of a tensor's parameter are in the file, int64; None: as they are. Takes the file, the
# part of the tensor's name and how many there are.
Order = Callable[[GgufFile, str, int], torch.Tensor | None]
RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
# Modules that layers of any architecture may have.
MODULES = (
    "input_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "post_attention_layernorm",
)
# Module outside the layers, by what the tensor is called; also of architectures whose table has no head, being tied.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def experts(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[str, ...]:
    """The modules of a router and its experts, which are all in `module`."""
    return f"{module}.gate", *(f"{module}.experts.*.{name}" for name in (gate, up, down))


def feed_forward(module: str) -> tuple[str, ...]:
    """The three linears of a gated feed-forward layer."""
    return tuple(f"{module}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))


# How checkpoints of different authors begin the names of their layers, in gguf's table.
_LAYER_PREFIXES = ("model.layers.0.", "backbone.layers.0.")


@dataclass(frozen=True)
class Architecture:
    """All that is particular to an architecture. The record is complete: no other file names the architecture."""

    # What config.json says: of the family, of its heads, of the epsilon (key there, key in the file).
    config: Rules
    heads: Rules = plain_heads
    epsilon: tuple[str, str] = RMS_EPSILON
    # False: layers differ in width, and `config` says how.
    has_one_width: bool = True
    # Modules of its layers by transformers' name, before those of MODULES; * stands for each expert's number.
    modules: tuple[str, ...] = ()
    # Whole name of a tensor in its layer -> parameter there: parameters of no module, and names that gguf lacks.
    parameters: Mapping[str, str] = field(default_factory=dict)
    # Modules outside the layers, by transformers' name.
    outside: tuple[str, ...] = ()
    # Tensors that are no parameter, since the config has what they say.
    in_config: frozenset[str] = frozenset()
    # Parameters that are several tensors.
    joined: tuple[Joined, ...] = ()
    # What the converter changed: rows and columns in another order, norms with 1 added (but those of recurrent layers),
    # matrices of one row that are vectors.
    row_order: Order | None = None
    column_order: Order | None = None
    norms_plus_one: bool = False
    one_row: frozenset[str] = frozenset()
    # Whether transformers has a tokenizer class for it; that class does not read the config of most others.
    has_tokenizer_class: bool = False
    # Another one with the same sentencepiece tokenizer, where transformers' table of those lacks this one.
    tokenizer_like: str = ""


@functools.cache
def module_names(architecture: str, modules: tuple[str, ...]) -> Mapping[str, str]:
    """Maps the part of a tensor's name in a layer to transformers' module in that layer."""
    table = _table(architecture)
    found: dict[str, str] = {}
    for module in (*modules, *MODULES):
        names = (table.get_name(prefix + module.replace(".*", "")) for prefix in _LAYER_PREFIXES)
        name = next((name for name in names if name is not None), None)
        if name is not None:
            found.setdefault(name.removeprefix("blk.0."), module)
    return found


@functools.cache
def outside_names(architecture: str, modules: tuple[str, ...]) -> Mapping[str, str]:
    """Maps the name of a tensor outside the layers, without "weight" or "bias", to transformers' module."""
    table = _table(architecture)
    named = ((table.get_name(module.replace(".*", "")), module) for module in modules)
    return OUTSIDE | {name: module for name, module in named if name is not None}


@functools.cache
def _table(architecture: str) -> Any:
    import gguf

    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(number, 1)
