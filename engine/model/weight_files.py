"""The tensors of a checkpoint folder by name, read one at a time from mapped files: safetensors or pytorch_model*.bin.

A .bin file is a pickle. torch's restricted unpickler reads it, which runs nothing that a file names. Not here: what the
tensors mean (quantised, gguf), the module they belong to (weights), and weights that wait to be packed (coded_weights).
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from outrider.engine.errors import ModelRefused
from outrider.kernels.linear.codes import Codes
from outrider.shared.checkpoint.file_names import weight_files
from outrider.shared.errors import ConfigError

FLOAT_TYPES = frozenset({"BF16", "F16", "F32", "F64"})
# safetensors' names, for the tensors of .bin files
_TYPE_NAMES = {
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a mapped file. stored_type: safetensors' name, e.g. "BF16"; read: reads it from the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    stored_type: str
    read: Callable[[], torch.Tensor]

    @property
    def is_float(self) -> bool:
        """Returns whether its numbers are weights without a scale; 8-bit floats need one."""
        return self.stored_type in FLOAT_TYPES


@dataclass(frozen=True)
class WeightReader:
    """Reads one weight.

    Calling it returns the weight, dequantised. codes: None where the file has none. expert_codes: those of one expert,
    by its number, where the weight holds all experts of a layer. All raise ModelRefused.
    """

    read: Callable[[], torch.Tensor]
    codes: Callable[[], Codes] | None = None
    expert_codes: Callable[[int], Codes] | None = None

    def __call__(self) -> torch.Tensor:
        return self.read()


def stored_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Maps a tensor's name to the tensor, over all files of the checkpoint, which are mapped.

    Raises ModelRefused if a file is missing or damaged, has a tensor that another one has, or holds anything but plain
    tensors.
    """
    try:
        files = weight_files(folder)
    except ConfigError as error:
        raise ModelRefused(str(folder), error.message) from error
    found: dict[str, StoredTensor] = {}
    for file in files:
        for tensor in _from_safetensors(file) if file.suffix == ".safetensors" else _from_pickle(file):
            if tensor.name in found:
                files_of_both = f"{found[tensor.name].file.name} and {file.name}"
                raise ModelRefused(str(folder), f"tensor {tensor.name} is in {files_of_both}; only one may have it")
            found[tensor.name] = tensor
    return found


def _from_safetensors(file: Path) -> Iterator[StoredTensor]:
    try:
        handle: Any = safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelRefused(str(file.parent), f"{file.name} cannot be read: {error}", "download it again") from error
    for name in handle.keys():  # noqa: SIM118  (a safetensors handle is not a dict)
        piece = handle.get_slice(name)
        shape, stored_type = tuple(piece.get_shape()), str(piece.get_dtype())
        yield StoredTensor(file, name, shape, stored_type, partial(handle.get_tensor, name))


def _from_pickle(file: Path) -> Iterator[StoredTensor]:
    content = _unpickled(file)
    if not isinstance(content, dict):
        raise _not_plain(file, f"it holds a {type(content).__name__}, not tensors by name")
    for name, value in content.items():
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            raise _not_plain(file, f"{name!r} is a {type(value).__name__}")
        if not isinstance(name, str):
            raise _not_plain(file, f"a tensor is called {name!r}")
        if value.dtype not in _TYPE_NAMES or value.layout != torch.strided or value.is_meta:
            raise _not_plain(file, f"{name!r} is a tensor of {value.dtype}, {value.layout}, on {value.device}")
        if value.nbytes > value.untyped_storage().nbytes():
            raise _not_plain(file, f"{name!r} repeats its numbers (strides {value.stride()})")
        tensor = value.detach()
        yield StoredTensor(file, name, tuple(tensor.shape), _TYPE_NAMES[tensor.dtype], tensor.contiguous)


def _unpickled(file: Path) -> object:
    try:
        # Files older than torch 1.6 are not archives, and only archives can be mapped.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
    except Exception as error:  # what a damaged pickle raises cannot be listed
        foreign = re.search(r"GLOBAL (\S+)", str(error))
        if foreign is not None:
            raise _not_plain(file, f"it names {foreign[1]}, which is not run") from error
        # Leaves out torch's advice, which is to unpickle the file without restrictions.
        said = re.sub(r"(?s).*WeightsUnpickler error: ", "", str(error)).strip().partition("\n")[0]
        cause = f"{file.name} cannot be read: {said or type(error).__name__}"
        raise ModelRefused(str(file.parent), cause, "download it again") from error


def _not_plain(file: Path, cause: str) -> ModelRefused:
    return ModelRefused(str(file.parent), f"{file.name} is more than plain tensors: {cause}", "serve it as safetensors")
