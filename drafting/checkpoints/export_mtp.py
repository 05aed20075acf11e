"""Writes a target with an MTP layer: a whole checkpoint, in which transformers, vLLM and load_mtp find both.

The layer is in a shard of its own, under its published names. The target's shards are hard links where the file system
has them, so the folder takes no more space than the layer; a shard with an earlier MTP layer is rewritten without it.
Not here: names and shapes (mtp_layout.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.drafting.checkpoints.mtp_layout import EMBEDDING, FAMILIES, MtpLayout
from outrider.drafting.checkpoints.tensor_table import TensorTable
from outrider.drafting.heads.mtp import MtpHead
from outrider.engine.model.guards import read_config, resolve_dtype
from outrider.shared.checkpoint.file_names import weight_files
from outrider.shared.checkpoint.json_file import read_object
from outrider.shared.checkpoint.mtp_layers import MTP_NAMES
from outrider.shared.checkpoint.quantization import read_quantization

SHARD = "model-mtp.safetensors"
# The single file of an unsharded target is renamed: under its own name it would be read in place of the index.
_UNDIVIDED, _TARGET_SHARD, _INDEX = "model.safetensors", "model-target.safetensors", "model.safetensors.index.json"
_OTHER_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".partial")
_NOT_COPIED = ("config.json", "README.md")


def require_exportable(target: Path) -> None:
    """Raises CheckpointRefused for a target whose files cannot take in an MTP layer: quantised, pickles, or of a family
    that is only read."""
    model_type = read_config(str(target)).get_text_config().model_type
    if model_type in FAMILIES and not FAMILIES[model_type].is_written:
        raise CheckpointRefused(
            target, f"the MTP layer of {model_type} is drafted with, but not trained or written here"
        )
    if read_quantization(target) is not None:
        raise CheckpointRefused(
            target, "it is quantised, and its MTP layer is not", "train on the checkpoint that it was made from"
        )
    with refusing(target, "reading its tensors"):
        others = [file.name for file in weight_files(target) if file.suffix != ".safetensors"]
    if others:
        raise CheckpointRefused(target, f"an MTP layer is written beside *.safetensors, not {others[0]}", "convert it")


def export_mtp(head: MtpHead, target: Path, out: Path, dtype: torch.dtype) -> None:
    """Writes the folder `out`: the target with this MTP layer, which replaces one that it already has.

    dtype: of the layer's weights; buffers keep theirs. Raises CheckpointRefused.
    """
    require_exportable(target)
    _require_room(target, out)
    out.mkdir(parents=True, exist_ok=True)
    table = TensorTable.read(target)
    layout = MtpLayout(target, table)
    layer = _layer_tensors(head, layout, table, dtype)
    _write_json(out / _INDEX, {"metadata": {}, "weight_map": _write_shards(target, layer, out)})
    for file in target.iterdir():
        if file.is_file() and file.name not in _NOT_COPIED and not file.name.endswith(_OTHER_WEIGHTS):
            shutil.copyfile(file, out / file.name)
    _write_json(out / "config.json", _config_with_layer(target, layout))


def _require_room(target: Path, out: Path) -> None:
    if out.resolve() == target.resolve():
        raise CheckpointRefused(out, "it is the target itself", "name another folder to write")
    if (out / _UNDIVIDED).exists():
        raise CheckpointRefused(out, f"it has a {_UNDIVIDED}, which would be read alone", "name an empty folder")


def _layer_tensors(head: MtpHead, layout: MtpLayout, table: TensorTable, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Returns the layer's tensors by name in the file.

    Published layouts with copies of the target's embedding and output head get both, in the target's dtype, unless the
    file has them.
    """
    weights = {name for name, _ in head.named_parameters()}
    state = {
        name: tensor.detach().cpu().to(dtype if name in weights else tensor.dtype)
        for name, tensor in head.state_dict().items()
        if not name.startswith(("embed_tokens.", "lm_head."))
    }
    own = {name: tensor for name, tensor in state.items() if not name.startswith("model.")}
    body = {name: tensor for name, tensor in state.items() if name not in own}
    found = {layout.file_name(name): tensor for name, tensor in (own | layout.stored(body)).items()}
    stored_dtype = resolve_dtype(str(table.folder), layout.config, "auto")
    for ours, name in layout.end_names().items():
        if name not in table:
            end: Any = head.embed_tokens if ours == EMBEDDING else head.lm_head
            found[name] = end.weight.detach().cpu().to(stored_dtype)
    return found


def _write_shards(target: Path, layer: Mapping[str, torch.Tensor], out: Path) -> dict[str, str]:
    """Writes or links the shards; returns the file of every tensor."""
    own_shard = dict(layer)
    weight_map: dict[str, str] = {}
    for file in weight_files(target):
        with safe_open(file, framework="pt") as shard:
            names = list(shard.keys())
            kept = [name for name in names if name not in layer]
            if file.name == SHARD:  # of an earlier export: what is left goes into the new one
                own_shard |= {name: shard.get_tensor(name) for name in kept}
                continue
            name = _TARGET_SHARD if file.name == _UNDIVIDED else file.name
            if len(kept) == len(names):
                _link(file, out / name)
            elif kept:
                _save({name: shard.get_tensor(name) for name in kept}, out / name)
        weight_map |= dict.fromkeys(kept, name)
    _save(own_shard, out / SHARD)
    weight_map |= dict.fromkeys(own_shard, SHARD)
    return weight_map


def _link(file: Path, out: Path) -> None:
    out.unlink(missing_ok=True)
    try:
        os.link(file.resolve(), out)
    except OSError:  # another file system, or one without links
        shutil.copyfile(file, out)


def _save(tensors: Mapping[str, torch.Tensor], out: Path) -> None:
    partial = out.with_name(f"{out.name}.partial")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, partial, {"format": "pt"})
    partial.chmod(0o644)  # save_file makes it private to this user, but containers run as another
    partial.rename(out)


def _config_with_layer(target: Path, layout: MtpLayout) -> dict[str, object]:
    """Returns the target's config.json with at least one MTP layer."""
    config = read_object(target / "config.json")
    text = config.get("text_config")
    fields = text if isinstance(text, dict) else config
    key = MTP_NAMES[layout.config.model_type].count_key
    fields[key] = max(1, fields.get(key) or 0)
    return config


def _write_json(path: Path, content: object) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    partial.rename(path)
