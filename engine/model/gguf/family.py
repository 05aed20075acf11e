"""The rules that make configs: values read by name, values that all checkpoints of a family share, and heads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.rope import rope_parameters

# Returns entries of config.json that the file does not state, or states under other names.
Rules = Callable[[GgufFile], dict[str, Any]]
# Maps a key of config.json -> the file's key, with a default where files may leave it out.
Keys = Mapping[str, str | tuple[str, Any]]


def values(file: GgufFile, keys: Keys) -> dict[str, Any]:
    """Maps each key of config.json to the file's value. Raises ModelRefused if it lacks one without a default."""
    return {name: file.own(*((key,) if isinstance(key, str) else key)) for name, key in keys.items()}


@dataclass(frozen=True)
class Family:
    """The rules of one family of models.

    fixed: values that all published checkpoints share; more: rules that are not a lookup by name; ignored: keys of the
    file that add nothing.
    """

    model_type: str
    causal_lm: str
    read: Keys = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    more: tuple[Rules, ...] = ()
    ignored: tuple[str, ...] = ()

    def __call__(self, file: GgufFile) -> dict[str, Any]:
        """Returns the family's entries of config.json. Raises ModelRefused."""
        for key in self.ignored:
            file.own(key, 0)
        found = values(file, self.read)
        for rules in self.more:
            found |= rules(file)
        return {"model_type": self.model_type, "architectures": [self.causal_lm], **self.fixed, **found}


def has(tensor: str, *keys: str) -> Rules:
    """Makes rules that set switches: whether the first layer has the tensor."""
    return lambda file: dict.fromkeys(keys, f"blk.0.{tensor}" in file.tensors)


def layer_kinds(kinds: Mapping[str, str], key: str = "layer_types") -> Rules:
    """Makes rules that list each layer's kind. kinds: tensor that a layer has -> its kind; the first match counts."""

    def rules(file: GgufFile) -> dict[str, Any]:
        return {key: [_kind(file, layer, kinds) for layer in range(file.num_layers)]}

    return rules


def _kind(file: GgufFile, layer: int, kinds: Mapping[str, str]) -> str:
    for tensor, kind in kinds.items():
        if f"blk.{layer}.{tensor}" in file.tensors:
            return kind
    wanted = " or ".join(f"blk.{layer}.{tensor}" for tensor in kinds)
    raise ModelRefused(file.path, f"it has no tensor {wanted}", "download it again")


def windows(every: int) -> Rules:
    """Makes rules that give a window to all layers but every n-th, unless the file lists them; none without a width."""

    def rules(file: GgufFile) -> dict[str, Any]:
        width = file.own("attention.sliding_window", 0)
        found = file.own("attention.sliding_window_pattern", every)
        layers = range(file.num_layers)
        has_window: Iterable[Any] = found if isinstance(found, list) else [(layer + 1) % found != 0 for layer in layers]
        if not width:
            return {"sliding_window": None, "layer_types": ["full_attention"] * file.num_layers}
        kinds = ["sliding_attention" if own else "full_attention" for own in has_window]
        return {"sliding_window": width, "layer_types": kinds[: file.num_layers]}

    return rules


def plain_heads(file: GgufFile) -> dict[str, Any]:
    """Reads heads of one width that are rotated whole. Raises ModelRefused if they are rotated in part."""
    found = _heads(file)
    file.require("rope.dimension_count", found["head_dim"])
    return found


def heads_rotated_in_part(file: GgufFile) -> dict[str, Any]:
    found = _heads(file)
    rotated = file.own("rope.dimension_count", found["head_dim"])
    return found | {
        "rope_parameters": found["rope_parameters"] | {"partial_rotary_factor": rotated / found["head_dim"]}
    }


def heads_without_rope(file: GgufFile) -> dict[str, Any]:
    """Reads heads without RoPE, and ignores the file's rotated width."""
    file.own("rope.dimension_count", 0)
    return _heads(file)


def _heads(file: GgufFile) -> dict[str, Any]:
    num_heads = file.uniform("attention.head_count")
    head_dim = file.own("attention.key_length", file.own("embedding_length") // num_heads)
    file.require("attention.value_length", head_dim)
    return {
        "num_attention_heads": num_heads,
        "num_key_value_heads": file.uniform("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(file),
    }
