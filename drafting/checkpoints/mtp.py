"""The MTP layer in a target's own checkpoint. transformers leaves its tensors out; they are read here by their names.

The layer is read as a one-layer model of the target's own class, so renaming and merging of experts are transformers'.
Not here: the head (drafting.heads.mtp), and whether a checkpoint has such a layer (shared/checkpoint/mtp_layers.py).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.frozen import FrozenEmbedding, FrozenLinear
from outrider.drafting.heads.mtp import MtpConfig, MtpHead
from outrider.engine.errors import ModelRefused
from outrider.engine.model.guards import read_config
from outrider.engine.model.weights import LazyTensor, build_model, lazy_tensors
from outrider.shared.checkpoint.mtp_layers import MTP_NAMES, count_mtp_layers
from outrider.shared.checkpoint.quantization import read_quantization
from outrider.shared.errors import ConfigError

_EMBEDDING, _LM_HEAD, _NORM = "model.embed_tokens.", "lm_head.", "model.norm."


@dataclass(frozen=True)
class _Family:
    """names: start of a tensor's name in the head -> in the file; {n}: the target's num_hidden_layers.

    layer: settings with which layer 0 of a one-layer model is the MTP layer. unused: starts of names that the file may
    have besides. All families concatenate embedding and feature in this order.
    """

    names: Mapping[str, str]
    layer: Mapping[str, Any] = field(default_factory=dict)
    unused: tuple[str, ...] = ()


def _after_layers(norm: str) -> dict[str, str]:
    return {
        "embedding_norm.": "model.layers.{n}.enorm.",
        "hidden_norm.": "model.layers.{n}.hnorm.",
        "fc.": "model.layers.{n}.eh_proj.",
        _NORM: f"model.layers.{{n}}.{norm}.",
        "model.layers.0.": "model.layers.{n}.",
    }


_COPIES = {_EMBEDDING: "model.layers.{n}.embed_tokens.", _LM_HEAD: "model.layers.{n}.shared_head.head."}
_DEEPSEEK = _after_layers("shared_head.norm") | _COPIES
_QWEN = {
    "embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "fc.": "mtp.fc.",
    _NORM: "mtp.norm.",
    "model.layers.0.": "mtp.layers.0.",
}
_ERNIE = {  # no norm after the layer
    "embedding_norm.": "model.mtp_emb_norm.0.",
    "hidden_norm.": "model.mtp_hidden_norm.0.",
    "fc.": "model.mtp_linear_proj.0.",
    "model.layers.0.": "model.mtp_block.0.",
}
_FULL_ATTENTION = {"layer_types": ["full_attention"]}
# By the model_type of the text model's config, as MTP_NAMES.
_FAMILIES = {
    "deepseek_v3": _Family(_DEEPSEEK, {"first_k_dense_replace": 0}),
    "ernie4_5_moe": _Family(_ERNIE, {"moe_layer_start_index": 1, "moe_layer_end_index": 1}),  # a dense layer
    "glm4_moe": _Family(_DEEPSEEK, {"first_k_dense_replace": 0}),
    "glm4_moe_lite": _Family(_DEEPSEEK, {"mlp_layer_types": ["sparse"]}),
    # Its own output head is not used, as in the model's reference: the target's is.
    "hy_v3": _Family(
        _after_layers("final_layernorm"), {"mlp_layer_types": ["sparse"]}, unused=("model.layers.{n}.shared_head.",)
    ),
    "qwen3_5_moe_text": _Family(_QWEN, _FULL_ATTENTION),
    "qwen3_5_text": _Family(_QWEN, _FULL_ATTENTION),
    "qwen3_next": _Family(_QWEN, _FULL_ATTENTION | {"mlp_only_layers": [], "decoder_sparse_step": 1}),
}


class _Source(NamedTuple):
    """A tensor of the file: its name there and the shape that the config gives it."""

    name: str
    shape: tuple[int, ...]


def load_mtp(
    path: str | Path, dtype: torch.dtype, *, embedding: nn.Module | None = None, lm_head: nn.Module | None = None
) -> MtpHead:
    """The first MTP layer of a target's folder, on the CPU in eval mode, with paged attention.

    embedding, lm_head: modules of the loaded target to share; None: their tensors are read from the folder too.
    Raises CheckpointRefused: there is no such layer, or a tensor of it is missing, unexpected, misshapen or quantised.
    """
    folder = Path(path)
    try:
        num_mtp_layers = count_mtp_layers(folder)
    except ConfigError as error:
        raise CheckpointRefused(folder, error.message) from error
    with refusing(folder, "reading its config"):
        config = read_config(str(folder)).get_text_config()
    family = _FAMILIES[config.model_type]
    starts = {ours: theirs.format(n=config.num_hidden_layers) for ours, theirs in family.names.items()}
    table = TensorTable.read(folder)
    with refusing(folder, "building its MTP layer"):
        layer_config = _one_layer(config, family)
        wanted = _wanted(layer_config, starts, table)
    ends = _stored_ends(table, starts, (config.vocab_size, config.hidden_size))
    sources = [*wanted.values(), *ends.values()]
    if read_quantization(folder) is None:
        unused = tuple(start.format(n=config.num_hidden_layers) for start in family.unused)
        _require_exactly(table, sources, config, num_mtp_layers, unused)
    with refusing(folder, "reading its MTP layer"):
        own, body = _read(folder, layer_config, wanted, dtype)
    if ends or embedding is None or lm_head is None:
        target = load_target_weights(folder, dtype)
        target.require_plain_lm_head(folder)
        embedding = _end(table, ends.get(_EMBEDDING), target.embedding, FrozenEmbedding, embedding)
        lm_head = _end(table, ends.get(_LM_HEAD), target.lm_head, FrozenLinear, lm_head)
    has_norm = _NORM in starts
    head = MtpHead(
        MtpConfig(config, config.num_hidden_layers), body, embedding=embedding, lm_head=lm_head, has_norm=has_norm
    )
    for name, tensor in own.items():
        head.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(tensor)
    return head.eval().requires_grad_(False)


def _one_layer(config: Any, family: _Family) -> Any:
    """A copy of the target's config whose only layer is the MTP layer. It has one token: embedding and output head of
    the model that is built from it are not used."""
    edited = copy.deepcopy(config)
    settings = {"num_hidden_layers": 1, "vocab_size": 1, "pad_token_id": None, "tie_word_embeddings": False}
    for name, value in (settings | dict(family.layer)).items():
        setattr(edited, name, value)
    return edited


def _wanted(layer_config: Any, starts: Mapping[str, str], table: TensorTable) -> dict[str, _Source]:
    """By name in the head; those of the layer by their names before transformers renames and merges them, unless the
    file has merged experts (some of Qwen3.5-MoE).
    """
    with torch.device("meta"):
        outline = AutoModelForCausalLM._model_mapping[type(layer_config)](layer_config)
    merged = outline.state_dict()
    is_merged = f"{starts['model.layers.0.']}mlp.experts.down_proj" in table
    stored = merged if is_merged else revert_weight_conversion(outline, merged)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items() if name.startswith("model.")}
    del shapes[f"{_EMBEDDING}weight"]
    if _NORM not in starts:
        del shapes[f"{_NORM}weight"]
    width = layer_config.hidden_size
    shapes |= {"embedding_norm.weight": (width,), "hidden_norm.weight": (width,), "fc.weight": (width, 2 * width)}
    found = {}
    for name, shape in shapes.items():
        ours = next(start for start in starts if name.startswith(start))
        found[name] = _Source(starts[ours] + name.removeprefix(ours), shape)
    return found


def _stored_ends(table: TensorTable, starts: Mapping[str, str], shape: tuple[int, int]) -> dict[str, _Source]:
    """The MTP layer's own embedding and output head, as far as the file has them."""
    names = {ours: f"{starts[ours]}weight" for ours in (_EMBEDDING, _LM_HEAD) if ours in starts}
    return {ours: _Source(name, shape) for ours, name in names.items() if name in table}


def _require_exactly(
    table: TensorTable, sources: Sequence[_Source], config: Any, num_mtp_layers: int, unused: tuple[str, ...]
) -> None:
    """Raises CheckpointRefused that names the tensor, unless the file has these of the MTP layer and no others."""
    for name, shape in sources:
        if name not in table:
            raise CheckpointRefused(table.folder, f"tensor {name} {list(shape)} of its MTP layer is missing")
        stored = table.tensors[name]
        if not stored.is_float:
            cause = f"tensor {name} of its MTP layer is stored as {stored.stored_type}, in a checkpoint that says"
            raise CheckpointRefused(table.folder, f"{cause} nothing of quantisation", "use an unquantised checkpoint")
        if stored.shape != shape:
            cause = f"tensor {name} of its MTP layer has shape {list(stored.shape)}, its config says {list(shape)}"
            raise CheckpointRefused(table.folder, cause)
    for name in sorted(table.tensors.keys() - {source.name for source in sources}):
        layer = MTP_NAMES[config.model_type].layer_of(name, config.num_hidden_layers)
        # Later layers are not used: the first one drafts every token.
        if layer is not None and not 0 < layer < num_mtp_layers and not name.startswith(unused):
            cause = f"tensor {name} {list(table.shape(name))} is unexpected: by its config, no MTP layer has it"
            raise CheckpointRefused(table.folder, cause)


def _read(
    folder: Path, layer_config: Any, wanted: Mapping[str, _Source], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Any]:
    """(the head's tensors by name, the one-layer model without its output head)."""
    refusals: list[ModelRefused] = []
    stored = lazy_tensors(str(folder), refusals)
    for name, _shape in wanted.values():
        if name not in stored:
            raise CheckpointRefused(folder, f"tensor {name} of its MTP layer is missing")
    width = layer_config.hidden_size
    placeholders = {f"{_EMBEDDING}weight": (1, width), f"{_LM_HEAD}weight": (1, width), f"{_NORM}weight": (width,)}
    in_body = {name: LazyTensor(partial(torch.ones, shape), refusals) for name, shape in placeholders.items()}
    in_body |= {name: stored[source.name] for name, source in wanted.items() if name.startswith("model.")}
    model = build_model(str(folder), layer_config, in_body, refusals, dtype)
    own = {}
    for name, source in wanted.items():
        if name not in in_body:
            own[name] = stored[source.name][...].to(dtype)
            if tuple(own[name].shape) != source.shape:  # of a quantised checkpoint
                raise CheckpointRefused(folder, f"tensor {source.name} has shape {list(own[name].shape)}")
    return own, model.get_decoder()


def _end(
    table: TensorTable,
    source: _Source | None,
    of_target: torch.Tensor,
    kind: type[FrozenEmbedding] | type[FrozenLinear],
    given: nn.Module | None,
) -> nn.Module:
    """An embedding or output head: the MTP layer's own if its numbers are not the target's, else the one given or the
    target's."""
    own = of_target if source is None else table.floats(source.name, of_target.dtype)
    if not torch.equal(own, of_target):
        return kind(own)
    return kind(of_target) if given is None else given
