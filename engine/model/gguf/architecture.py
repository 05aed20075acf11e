"""Architecture: the record of all that is particular to one architecture of GGUF files, its tensors' names included.

The converter's own table (gguf.tensor_mapping) maps the tensors of the file to modules of transformers' model. A record
lists the modules that its layers have besides MODULES, and what that table lacks. Not here: the records (dense, gemma,
mixtures, hybrids), parameters of several tensors (joined), what the converter changed in a tensor (undone).
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

# Returns where the rows, or columns, of a tensor's parameter are in the file, int64; None: in the same order. Takes the
# file, the part of the tensor's name and the number of rows or columns.
Order = Callable[[GgufFile, str, int], torch.Tensor | None]
RMS_EPSILON = ("rms_norm_eps", "attention.layer_norm_rms_epsilon")
# Modules that layers of any architecture may have.
MODULES = (
    "input_layernorm",
    *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    *(f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    "post_attention_layernorm",
)
# Maps a tensor's name to a module outside the layers; includes the head of tied architectures, which their table lacks.
OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def experts(module: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj") -> tuple[str, ...]:
    """Returns the modules of a router and its experts, which are all in `module`."""
    return f"{module}.gate", *(f"{module}.experts.*.{name}" for name in (gate, up, down))


def feed_forward(module: str) -> tuple[str, ...]:
    """Returns the three linears of a gated feed-forward layer."""
    return tuple(f"{module}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))


# Prefixes of layer names in gguf's table, which differ between the authors of checkpoints.
_LAYER_PREFIXES = ("model.layers.0.", "backbone.layers.0.")


@dataclass(frozen=True)
class Architecture:
    """All that is particular to an architecture. The record is complete: no other file names the architecture."""

    # Entries of config.json: the family's, those of its heads, and the epsilon's key with its key in the file.
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
    # Changes by the converter: rows and columns in another order, norms with 1 added (but not those of recurrent
    # layers), matrices of one row stored as vectors.
    row_order: Order | None = None
    column_order: Order | None = None
    norms_plus_one: bool = False
    one_row: frozenset[str] = frozenset()
    # True if transformers has a tokenizer class for it; that class does not read the config of most others.
    has_tokenizer_class: bool = False
    # An architecture with the same sentencepiece tokenizer, where transformers' table of those lacks this one.
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
