"""Medusa checkpoints in three layouts: vLLM's, the original one (which TGI reads), and ModelOpt's in-model names.

    vLLM      blocks.{i}.layers.{j}.{weight,bias}, lm_heads.{i}.weight or one lm_head.weight, token_map
    original  {i}.{j}.linear.{weight,bias}, {i}.{num_layers}.weight
    ModelOpt  the original's under medusa_heads., in the target's checkpoint
The numbers of heads and layers are in config.json under several names, or else follow from the tensors.
Not here: the heads themselves (drafting.heads.medusa).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.drafting.checkpoints.config_fields import ConfigFields, read_config
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.fill_module import build_on_meta, fill, require_ids
from outrider.drafting.checkpoints.recognise import require_not_quantised
from outrider.drafting.checkpoints.target_weights import TargetWeights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.medusa import MedusaConfig, MedusaHeads

_PREFIX = "medusa_heads."
_ORIGINAL = re.compile(r"(?:medusa_heads\.)?(\d{1,3})\.(\d{1,3})\.linear\.(weight|bias)")
_VLLM = re.compile(r"(?:medusa_heads\.)?blocks\.(\d{1,3})\.layers\.(\d{1,3})\.(weight|bias)")
_NUM_HEADS = ("medusa_num_heads", "num_heads")
_NUM_LAYERS = ("medusa_num_layers", "num_layers")


@dataclass(frozen=True)
class _Layout:
    """The file's naming of its tensors. prefix: that of all of the heads' tensors."""

    is_vllm: bool
    prefix: str
    num_heads: int
    num_layers: int
    has_bias: bool

    def sources(self, config: MedusaConfig) -> dict[str, str]:
        """Maps a name in the head -> the name in the file."""
        sources = {}
        for i in range(config.num_heads):
            for j in range(config.num_layers):
                block = f"blocks.{i}.layers.{j}" if self.is_vllm else f"{i}.{j}.linear"
                for part in ("weight", "bias"):
                    sources[f"blocks.{i}.layers.{j}.{part}"] = f"{self.prefix}{block}.{part}"
            head = f"lm_heads.{i}" if self.is_vllm else f"{i}.{config.num_layers}"
            sources[f"lm_heads.{i}.weight"] = f"{self.prefix}{head}.weight"
        return sources


def load_medusa(path: str | Path, target: TargetWeights, dtype: torch.dtype) -> MedusaHeads:
    """Loads the heads in eval mode; a shared output head comes from the checkpoint, or else from the target.

    Raises CheckpointRefused for any mismatch.
    """
    folder = Path(path)
    fields = read_config(folder)
    require_not_quantised(folder, fields)
    table = TensorTable.read(folder)
    target.require_same_tokenizer(folder)
    layout = _read_layout(table)
    config = _head_config(fields, table, layout, target)
    token_map = _read_token_map(table, layout, config)
    sources = layout.sources(config)
    given: dict[str, torch.Tensor] = {} if token_map is None else {"token_map": token_map}
    ignored = _tensors_of_the_target(table, layout)
    shared = None
    if config.shares_lm_head:
        name = _shared_lm_head_name(table, layout)
        if name is None:
            target.require_plain_lm_head(folder)
        else:
            ignored.add(name)
        shared = _rows(
            table, name, target.lm_head.to(dtype) if name is None else table.floats(name, dtype), config, token_map
        )
    else:
        for i in range(config.num_heads):
            name = sources[f"lm_heads.{i}.weight"]
            if token_map is not None and name in table and table.shape(name)[0] > config.head_vocab_size:
                given[f"lm_heads.{i}.weight"] = _rows(table, name, table.floats(name, dtype), config, token_map)
    head = build_on_meta(table, lambda: MedusaHeads(config, lm_head=shared, token_map=token_map))
    if token_map is not None:
        ignored.add(f"{layout.prefix}token_map")
    return fill(head, table, dtype, sources=sources, given=given, ignored=ignored)


def _read_layout(table: TensorTable) -> _Layout:
    for is_vllm, pattern in ((True, _VLLM), (False, _ORIGINAL)):
        matches = [match for match in map(pattern.fullmatch, table.tensors) if match]
        if matches:
            prefix = _PREFIX if matches[0].string.startswith(_PREFIX) else ""
            num_heads = 1 + max(int(match[1]) for match in matches)
            num_layers = 1 + max(int(match[2]) for match in matches)
            has_bias = any(match[3] == "bias" for match in matches)
            num_weights = sum(match[3] == "weight" for match in matches)
            if num_weights != num_heads * num_layers:
                blocks = f"{num_heads} heads of {num_layers} layers need {num_heads * num_layers} weights of blocks"
                raise CheckpointRefused(table.folder, f"{blocks}, there are {num_weights}: {table.summary()}")
            return _Layout(is_vllm, prefix, num_heads, num_layers, has_bias)
    wanted = "blocks.{i}.layers.{j}.weight or {i}.{j}.linear.weight"
    raise CheckpointRefused(table.folder, f"no Medusa head: looked for {wanted} among {table.summary()}")


def _head_config(fields: ConfigFields, table: TensorTable, layout: _Layout, target: TargetWeights) -> MedusaConfig:
    owner = f"the target {target.path}"
    fields.require_equal("hidden_size", fields.integer("hidden_size", target.hidden_size), target.hidden_size, owner)
    fields.require_equal("vocab_size", fields.integer("vocab_size", target.vocab_size), target.vocab_size, owner)
    if fields.number("logit_scale", 1.0) != 1.0:
        raise CheckpointRefused(fields.file, f"logit_scale is {fields.get('logit_scale')}, only 1 is supported")
    is_own_config = fields.get("model_type") == "medusa"
    layer_keys = (*_NUM_LAYERS, "num_hidden_layers") if is_own_config else _NUM_LAYERS
    head_vocab_size = fields.integer("truncated_vocab_size", target.vocab_size)
    if head_vocab_size > target.vocab_size:
        raise CheckpointRefused(
            fields.file, f"truncated_vocab_size is {head_vocab_size}, {owner} has {target.vocab_size}"
        )
    with refusing(table.folder, "reading its config"):
        config = MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            num_heads=_count(fields, _NUM_HEADS, layout.num_heads),
            num_layers=_count(fields, layer_keys, layout.num_layers),
            has_bias=fields.flag("medusa_fc_bias", layout.has_bias),
            head_vocab_size=head_vocab_size,
            shares_lm_head=fields.flag("original_lm_head"),
        )
    return config


def _count(fields: ConfigFields, keys: tuple[str, ...], in_file: int) -> int:
    """Returns the count under the first key present; else that of the tensors."""
    for key in keys:
        if fields.get(key) is not None:
            count = fields.integer(key, maximum=1000)
            fields.require_equal(key, count, in_file, "the file of tensors")
            return count
    return in_file


def _read_token_map(table: TensorTable, layout: _Layout, config: MedusaConfig) -> torch.Tensor | None:
    name = f"{layout.prefix}token_map"
    if name not in table and config.head_vocab_size == config.vocab_size:
        return None
    if table.shape(name) != (config.head_vocab_size,):
        cause = f"tensor {name} has shape {list(table.shape(name))}, the config says {[config.head_vocab_size]}"
        raise CheckpointRefused(table.folder, cause)
    token_map = table.integers(name)
    require_ids(table, name, token_map, config.vocab_size)
    return token_map


def _shared_lm_head_name(table: TensorTable, layout: _Layout) -> str | None:
    names = (f"{layout.prefix}lm_head.weight", f"{layout.prefix}lm_heads.0.weight")
    return next((name for name in names if name in table), None)


def _rows(
    table: TensorTable, name: str | None, weight: torch.Tensor, config: MedusaConfig, token_map: torch.Tensor | None
) -> torch.Tensor:
    """Returns the rows of an output head that a reduced vocabulary uses; weight [head or whole vocabulary, H]."""
    kept = (config.head_vocab_size, config.hidden_size)
    if token_map is not None and tuple(weight.shape) == (config.vocab_size, config.hidden_size) != kept:
        weight = weight[token_map]
    if tuple(weight.shape) != kept:
        cause = f"tensor {name} has shape {list(weight.shape)}, the config says {list(kept)}"
        raise CheckpointRefused(table.folder, cause)
    return weight


def _tensors_of_the_target(table: TensorTable, layout: _Layout) -> set[str]:
    """Returns the names of the target's own tensors, which ModelOpt stores in the same checkpoint."""
    if layout.is_vllm or not layout.prefix:
        return set()
    return {name for name in table.tensors if not name.startswith(_PREFIX)}
