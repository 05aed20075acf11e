"""A GGUF file's tensors as the parameters of transformers' model: dequantised when they are read, or as codes.

A layer's experts, which are one tensor, are read one by one. Not here: the config (config), names (names), what the
converter changed (undone), parameters of several tensors (joined).
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
from outrider.engine.model.gguf.codes import codes_of, has_codes
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.joined import JOINED, Joined, Part
from outrider.engine.model.gguf.names import IN_CONFIG, MODULES, NAMES, OUTSIDE, Names
from outrider.engine.model.weight_files import StoredTensor
from outrider.engine.model.weight_reader import WeightReader
from outrider.kernels.linear.codes import Codes

_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")


def gguf_readers(file: GgufFile) -> dict[str, WeightReader]:
    """Parameter's name -> how it is read, in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {parameter: reader for parameter, _, reader in _parameters(file)}


def gguf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """By the parameter's name, each read in float32. Raises ModelRefused for a tensor that is no parameter."""
    return {
        parameter: StoredTensor(Path(file.path), parameter, shape, "F32", reader)
        for parameter, shape, reader in _parameters(file)
    }


def _parameters(file: GgufFile) -> Iterator[tuple[str, tuple[int, ...], WeightReader]]:
    """(parameter's name, its shape, how it is read); those for multi-token prediction are left out."""
    names = NAMES.get(file.architecture, Names())
    used = set(IN_CONFIG | names.in_config)
    for layer, joined in _joined(file):
        tensors = [f"blk.{layer}.{tensor}" for tensor in joined.tensors]
        used.update(tensors)
        yield f"model.layers.{layer}.{joined.parameter}", *joined.join(file, [_part(file, name) for name in tensors])
    for name, tensor in file.tensors.items():
        match = _LAYER.fullmatch(name)
        if name in used or (match is not None and int(match[1]) >= file.num_layers):
            continue
        parameter, shape = _parameter(file, names, name), _shape(file, name)
        if "*" in parameter:
            for expert, data in enumerate(tensor.data):
                yield parameter.replace("*", str(expert)), shape[1:], _reader(file, name, data)
        else:
            yield parameter, shape, _reader(file, name, tensor.data)


def _joined(file: GgufFile) -> Iterator[tuple[int, Joined]]:
    """(layer, what makes up a parameter of it), of layers that have such tensors. Raises ModelRefused: not all of
    them."""
    for joined in JOINED.get(file.architecture, ()):
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
    """(part, "weight", "bias" or nothing) of a tensor's name"""
    match = _LAYER.fullmatch(name)
    if match is not None:
        return match[2], match[3] or ""
    part, _, kind = name.rpartition(".")
    return part, kind


def _shape(file: GgufFile, name: str) -> tuple[int, ...]:
    stored = tuple(int(size) for size in reversed(file.tensors[name].shape))
    part, kind = _split(name)
    return undone.shape_of(file, part, stored, kind)


def _parameter(file: GgufFile, names: Names, name: str) -> str:
    match, modules = _LAYER.fullmatch(name), {**MODULES, **names.modules}
    if match is None:
        parameter = names.outside.get(name, OUTSIDE.get(name))
    else:
        layer, part, kind = match.groups()
        in_layer = name.split(".", 2)[2]
        own = names.parameters.get(in_layer, f"{modules[part]}.{kind}" if kind and part in modules else None)
        parameter = None if own is None else f"model.layers.{layer}.{own}"
    if parameter is None:
        raise file.not_read(f"its tensor {name} is not read")
    return parameter


def _reader(file: GgufFile, name: str, data: NDArray[Any]) -> WeightReader:
    """data: the tensor's, or one expert's of it."""
    tensor_type = file.tensors[name].tensor_type
    part, kind = _split(name)

    def require_finite(*parts: torch.Tensor | None) -> None:
        if not all(bool(torch.isfinite(part).all()) for part in parts if part is not None):
            raise ModelRefused(file.path, f"its tensor {name} has values that are not finite")

    def read() -> torch.Tensor:
        values = dequantised(data, tensor_type)
        rows, columns = undone.row_order(file, part, len(values)), undone.column_order(file, part)
        values = values if rows is None else values[rows]
        values = values if columns is None else values[:, columns]
        values = undone.values_of(file, part, kind, values)
        require_finite(values)
        return values

    def codes() -> Codes:
        from gguf import GGML_QUANT_SIZES

        block_bytes = GGML_QUANT_SIZES[tensor_type][1]
        found = codes_of(torch.from_numpy(np.array(data)), tensor_type.name, block_bytes)
        require_finite(found.scales, found.minimums)
        rows, columns = undone.row_order(file, part, found.shape[0]), undone.column_order(file, part)
        found = found if rows is None else found.rows(rows)
        return found if columns is None else found.columns(columns)

    return WeightReader(read, codes if has_codes(tensor_type.name) else None)


def dequantised(data: NDArray[Any], kind: Any) -> torch.Tensor:
    """kind: of gguf.GGMLQuantizationType."""
    from gguf.quants import dequantize

    return torch.from_numpy(np.array(dequantize(data, kind), np.float32))
