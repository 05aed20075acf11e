"""A GGUF file's tensors as the parameters of transformers' model: dequantised when they are read, or as codes.

The experts of a layer, which are one tensor, are read one by one. Not here: the config (config), what an architecture
has (its record), what the converter changed (undone), parameters of several tensors (joined).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.errors import ModelRefused
from outrider.engine.model.gguf import undone
from outrider.engine.model.gguf.architecture import Architecture, module_names, outside_names
from outrider.engine.model.gguf.architectures import architecture_of
from outrider.engine.model.gguf.codes import codes_of, has_codes
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.joined import Joined, Part
from outrider.engine.model.weight_files import StoredTensor, WeightReader
from outrider.kernels.linear.codes import Codes

# Tensors of any architecture that are no parameter, since the config states what they say.
_IN_CONFIG = frozenset({"rope_freqs.weight"})
_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")


def gguf_readers(file: GgufFile) -> dict[str, WeightReader]:
    """Maps a parameter's name -> its reader, in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {parameter: reader for parameter, _, reader in _parameters(file)}


def gguf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """Maps a parameter's name -> its tensor, read in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {
        parameter: StoredTensor(Path(file.path), parameter, shape, "F32", reader)
        for parameter, shape, reader in _parameters(file)
    }


def _parameters(file: GgufFile) -> Iterator[tuple[str, tuple[int, ...], WeightReader]]:
    """Yields (parameter's name, shape, reader), without the layers for multi-token prediction."""
    architecture = architecture_of(file)
    used = set(_IN_CONFIG | architecture.in_config)
    for layer, joined in _joined(file, architecture):
        tensors = [f"blk.{layer}.{tensor}" for tensor in joined.tensors]
        used.update(tensors)
        yield f"model.layers.{layer}.{joined.parameter}", *joined.join(file, [_part(file, name) for name in tensors])
    for name, tensor in file.tensors.items():
        match = _LAYER.fullmatch(name)
        if name in used or (match is not None and int(match[1]) >= file.num_layers):
            continue
        parameter, shape = _parameter(file, architecture, name), _shape(file, name)
        if "*" in parameter:
            for expert, data in enumerate(tensor.data):
                yield parameter.replace("*", str(expert)), shape[1:], _reader(file, name, data)
        else:
            yield parameter, shape, _reader(file, name, tensor.data)


def _joined(file: GgufFile, architecture: Architecture) -> Iterator[tuple[int, Joined]]:
    """Yields (layer, joined parameter) of layers with its tensors.

    Raises ModelRefused if a layer has only some of them.
    """
    for joined in architecture.joined:
        for layer in range(file.num_layers):
            missing = [name for tensor in joined.tensors if (name := f"blk.{layer}.{tensor}") not in file.tensors]
            if len(missing) == len(joined.tensors):
                continue  # the model's own check says what it lacks
            if missing:
                raise ModelRefused(file.path, f"it has no tensor {missing[0]}", "download it again")
            yield layer, joined


def _part(file: GgufFile, name: str) -> Part:
    tensor = file.tensors[name]

    def expert_codes(expert: int) -> Codes:
        codes = _reader(file, name, tensor.data[expert]).codes
        if codes is None:
            raise ModelRefused(file.path, f"its tensor {name} has no codes")
        return codes()

    kind = tensor.tensor_type.name
    shape, reader = _shape(file, name), _reader(file, name, tensor.data)
    if len(shape) == 3:
        return Part(shape, kind, reader, None, expert_codes if has_codes(kind) else None)
    return Part(shape, kind, reader, reader.codes, None)


def _split(name: str) -> tuple[str, str]:
    """Splits a tensor's name into (part, kind); kind: "weight", "bias" or ""."""
    match = _LAYER.fullmatch(name)
    if match is not None:
        return match[2], match[3] or ""
    part, _, kind = name.rpartition(".")
    return part, kind


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    stored = tuple(int(size) for size in reversed(file.tensors[name].shape))
    part, kind = _split(name)
    return undone.shape_of(architecture_of(file), part, stored, kind)


def _parameter(file: GgufFile, architecture: Architecture, name: str) -> str:
    match = _LAYER.fullmatch(name)
    if match is None:
        part, kind = _split(name)
        module = outside_names(file.architecture, architecture.outside).get(part)
        parameter = None if module is None else f"{module}.{kind}"
    else:
        layer, part, kind = match.groups()
        in_layer = name.split(".", 2)[2]
        module = module_names(file.architecture, architecture.modules).get(part)
        own = architecture.parameters.get(in_layer, f"{module}.{kind}" if kind and module is not None else None)
        parameter = None if own is None else f"model.layers.{layer}.{own}"
    if parameter is None:
        raise file.not_read(f"its tensor {name} is not read")
    return parameter


def _reader(file: GgufFile, name: str, data: NDArray[Any]) -> WeightReader:
    """Returns the reader of a tensor. data: the whole tensor's, or one expert's part of it."""
    architecture, tensor_type = architecture_of(file), file.tensors[name].tensor_type
    part, kind = _split(name)

    def orders(num_rows: int, num_columns: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rows, columns = architecture.row_order, architecture.column_order
        return rows and rows(file, part, num_rows), columns and columns(file, part, num_columns)

    def require_finite(*parts: torch.Tensor | None) -> None:
        if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
            raise ModelRefused(file.path, f"its tensor {name} has values that are not finite")

    def read() -> torch.Tensor:
        values = dequantised(data, tensor_type)
        rows, columns = orders(values.shape[0], values.shape[-1])
        values = values if rows is None else values[rows]
        values = values if columns is None else values[:, columns]
        values = undone.values_of(architecture, part, kind, values)
        require_finite(values)
        return values

    def codes() -> Codes:
        from gguf import GGML_QUANT_SIZES

        block_bytes = GGML_QUANT_SIZES[tensor_type][1]
        found = codes_of(torch.from_numpy(np.array(data)), tensor_type.name, block_bytes)
        require_finite(found.scales, found.minimums)
        rows, columns = orders(*found.shape)
        found = found if rows is None else found.rows(rows)
        return found if columns is None else found.columns(columns)

    return WeightReader(read, codes if has_codes(tensor_type.name) else None)


def dequantised(data: NDArray[Any], kind: Any) -> torch.Tensor:
    """Dequantises to float32. kind: of gguf.GGMLQuantizationType."""
    from gguf.quants import dequantize

    return torch.from_numpy(np.array(dequantize(data, kind), np.float32))
