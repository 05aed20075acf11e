"""Loads a target's MTP layer from its own checkpoint, whose MTP tensors transformers ignores, or makes a new one.

Not here: names and shapes (mtp_layout.py), the head (drafting.heads.mtp), whether a checkpoint has such a layer
(shared/checkpoint/mtp_layers.py), writing one (export_mtp.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.mtp_layout import EMBEDDING, LM_HEAD, MtpLayout
from outrider.drafting.checkpoints.target_weights import load_target_weights
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.frozen import FrozenEmbedding, FrozenLinear
from outrider.drafting.heads.mtp import MtpConfig, MtpHead
from outrider.engine.errors import ModelRefused
from outrider.engine.model.weights import LazyTensor, build_model, lazy_tensors
from outrider.shared.checkpoint.mtp_layers import MTP_NAMES, count_mtp_layers
from outrider.shared.checkpoint.quantization import read_quantization
from outrider.shared.errors import ConfigError


class _Source(NamedTuple):
    """A tensor of the file: its name there and the shape that the config gives it."""

    name: str
    shape: tuple[int, ...]


def load_mtp(
    path: str | Path, dtype: torch.dtype, *, embedding: nn.Module | None = None, lm_head: nn.Module | None = None
) -> MtpHead:
    """Loads the first MTP layer of a target's folder, on the CPU in eval mode, with paged attention.

    embedding, lm_head: modules of the loaded target to share; None: their tensors are read from the folder too. Raises
    CheckpointRefused if there is no such layer, or a tensor of it is missing, unexpected, misshapen or quantised.
    """
    folder = Path(path)
    try:
        num_mtp_layers = count_mtp_layers(folder)
    except ConfigError as error:
        raise CheckpointRefused(folder, error.message) from error
    table = TensorTable.read(folder)
    layout = MtpLayout(folder, table)
    wanted = {name: _Source(layout.file_name(name), shape) for name, shape in layout.shapes().items()}
    shape = (layout.config.vocab_size, layout.config.hidden_size)
    ends = {ours: _Source(name, shape) for ours, name in layout.end_names().items() if name in table}
    if read_quantization(folder) is None:
        _require_exactly(table, [*wanted.values(), *ends.values()], layout, num_mtp_layers)
    with refusing(folder, "reading its MTP layer"):
        own, model = _read(folder, layout, wanted, dtype)
    if ends or embedding is None or lm_head is None:
        target = load_target_weights(folder, dtype)
        target.require_plain_lm_head(folder)
        embedding = _end(table, ends.get(EMBEDDING), target.embedding, FrozenEmbedding, embedding)
        lm_head = _end(table, ends.get(LM_HEAD), target.lm_head, FrozenLinear, lm_head)
    head = _head(layout, model, embedding, lm_head)
    for name, tensor in own.items():
        head.get_submodule(name.removesuffix(".weight")).weight = nn.Parameter(tensor)
    return head.eval().requires_grad_(False)


def new_mtp(path: str | Path, *, embedding: nn.Module, lm_head: nn.Module) -> MtpHead:
    """Makes an MTP layer with new float32 weights, of the shape that the target's family publishes; on the CPU.

    embedding, lm_head: those of the target. Raises CheckpointRefused; the family must be one of FAMILIES.
    """
    folder = Path(path)
    layout = MtpLayout(folder, TensorTable.read(folder))
    with refusing(folder, "building its MTP layer"):
        return _head(layout, layout.new_model().float(), embedding, lm_head)


def _head(layout: MtpLayout, model: Any, embedding: nn.Module, lm_head: nn.Module) -> MtpHead:
    config, body = MtpConfig(layout.config, layout.num_layers), model.get_decoder()
    return MtpHead(config, body, embedding=embedding, lm_head=lm_head, has_norm=layout.has_norm)


def _require_exactly(table: TensorTable, sources: Sequence[_Source], layout: MtpLayout, num_mtp_layers: int) -> None:
    """Raises CheckpointRefused that names the tensor, unless the file has exactly these tensors of the MTP layer."""
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
        layer = MTP_NAMES[layout.config.model_type].layer_of(name, layout.num_layers)
        # Later layers are not used: the first one drafts every token.
        if layer is not None and not 0 < layer < num_mtp_layers and not name.startswith(layout.unused_starts()):
            cause = f"tensor {name} {list(table.shape(name))} is unexpected: by its config, no MTP layer has it"
            raise CheckpointRefused(table.folder, cause)


def _read(
    folder: Path, layout: MtpLayout, wanted: Mapping[str, _Source], dtype: torch.dtype
) -> tuple[dict[str, torch.Tensor], Any]:
    """Reads (the head's tensors by name, the one-layer model)."""
    refusals: list[ModelRefused] = []
    stored = lazy_tensors(str(folder), refusals)
    for name, _shape in wanted.values():
        if name not in stored:
            raise CheckpointRefused(folder, f"tensor {name} of its MTP layer is missing")
    width = layout.layer_config.hidden_size
    ends = {f"{layout.family.embedding}weight": (1, width), f"{LM_HEAD}weight": (1, width)}
    placeholders = ends | {f"{layout.family.norm}weight": (width,)}
    in_body = {name: LazyTensor(partial(torch.ones, shape), refusals) for name, shape in placeholders.items()}
    in_body |= {name: stored[source.name] for name, source in wanted.items() if name.startswith("model.")}
    model = build_model(str(folder), layout.layer_config, in_body, refusals, dtype)
    own = {}
    for name, source in wanted.items():
        if name not in in_body:
            own[name] = stored[source.name][...].to(dtype)
            if tuple(own[name].shape) != source.shape:  # of a quantised checkpoint
                raise CheckpointRefused(folder, f"tensor {source.name} has shape {list(own[name].shape)}")
    return own, model


def _end(
    table: TensorTable,
    source: _Source | None,
    of_target: torch.Tensor,
    kind: type[FrozenEmbedding] | type[FrozenLinear],
    given: nn.Module | None,
) -> nn.Module:
    """Returns an embedding or output head: the MTP layer's own if it differs from the target's, else a shared one.

    The shared one is the given module, or the target's tensor.
    """
    own = of_target if source is None else table.floats(source.name, of_target.dtype)
    if not torch.equal(own, of_target):
        return kind(own)
    return kind(of_target) if given is None else given
