"""The tensors of a checkpoint folder: names, shapes and types without reading any, then single ones.

Not here: which tensors a head needs (the loaders, fill_module). Only safetensors is read: its header is checked
against the size of the file before anything is allocated, and it cannot run code.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path, PurePath

import torch
from safetensors import safe_open

from drafter_service.checkpoints.config_fields import read_json_object
from drafter_service.checkpoints.errors import CheckpointRefused, refusing

FLOAT_TYPES = frozenset({"BF16", "F16", "F32", "F64"})
INTEGER_TYPES = frozenset({"I32", "I64"})
_INDEX = "model.safetensors.index.json"
_PICKLES = ("*.bin", "*.pt", "*.pth")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is stored and what it is; `stored_type` is safetensors' name, e.g. "BF16"."""

    file: Path
    shape: tuple[int, ...]
    stored_type: str


class TensorTable:
    """All tensors of a folder by name."""

    def __init__(self, folder: Path, tensors: dict[str, TensorInfo]) -> None:
        self.folder = folder
        self.tensors = tensors

    @classmethod
    def read(cls, folder: Path) -> TensorTable:
        """Raises CheckpointRefused if there is no safetensors file, or one that is damaged or missing."""
        tensors: dict[str, TensorInfo] = {}
        for file in _files(folder):
            for name, info in _read_header(file).items():
                if name in tensors:
                    places = f"{tensors[name].file.name} and {file.name}"
                    raise CheckpointRefused(folder, f"tensor {name} is in {places}: which one is meant?")
                tensors[name] = info
        return cls(folder, tensors)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Raises CheckpointRefused if there is no such tensor."""
        if name not in self.tensors:
            raise CheckpointRefused(self.folder, f"tensor {name} is missing; there are {self.summary()}")
        return self.tensors[name].shape

    def floats(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        """A tensor of finite numbers, as `dtype` (None: as stored, float64 and float16 as float32)."""
        info = self.tensors[name]
        if info.stored_type not in FLOAT_TYPES:
            cause = f"tensor {name} is stored as {info.stored_type}, not as one of {', '.join(sorted(FLOAT_TYPES))}"
            raise CheckpointRefused(self.folder, cause, "use the checkpoint that is not quantised")
        tensor = self._read(name)
        if dtype is None:
            dtype = torch.bfloat16 if info.stored_type == "BF16" else torch.float32
        tensor = tensor.to(dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointRefused(self.folder, f"tensor {name} holds values that are not finite numbers in {dtype}")
        return tensor

    def integers(self, name: str) -> torch.Tensor:
        """A tensor of whole numbers, as int64."""
        info = self.tensors[name]
        if info.stored_type not in INTEGER_TYPES:
            cause = f"tensor {name} is stored as {info.stored_type}, not as one of {', '.join(sorted(INTEGER_TYPES))}"
            raise CheckpointRefused(self.folder, cause)
        return self._read(name).to(torch.int64)

    def summary(self) -> str:
        """A few of the names, for messages."""
        names = sorted(self.tensors)
        return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")

    def _read(self, name: str) -> torch.Tensor:
        file = self.tensors[name].file
        with refusing(file, f"reading tensor {name}"), safe_open(file, framework="pt") as handle:
            tensor: torch.Tensor = handle.get_tensor(name)
        return tensor


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise CheckpointRefused(folder, "there is no such folder", "download the checkpoint and name its folder")
    if (folder / _INDEX).exists():
        return _indexed_files(folder)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickles = sorted(file.name for pattern in _PICKLES for file in folder.glob(pattern))
    if not pickles:
        raise CheckpointRefused(folder, "there is no *.safetensors file in it")
    convert = f'save_file(torch.load("{pickles[0]}", map_location="cpu", weights_only=True), "model.safetensors")'
    fix = f"convert it where you trust it: from safetensors.torch import save_file; {convert}"
    raise CheckpointRefused(folder, f"{pickles[0]} is a pickle, which can run code when it is read", fix)


def _indexed_files(folder: Path) -> list[Path]:
    weight_map = read_json_object(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointRefused(folder / _INDEX, "it has no weight_map")
    names = set()
    for name in weight_map.values():
        if not isinstance(name, str) or PurePath(name).name != name or not name.endswith(".safetensors"):
            raise CheckpointRefused(folder / _INDEX, f"weight_map names {name!r}, not a *.safetensors file beside it")
        if not (folder / name).is_file():
            raise CheckpointRefused(folder / _INDEX, f"weight_map names {name}, which is not there")
        names.add(name)
    return [folder / name for name in sorted(names)]


def _read_header(file: Path) -> dict[str, TensorInfo]:
    with refusing(file, "reading the safetensors header"), safe_open(file, framework="pt") as handle:
        slices = {name: handle.get_slice(name) for name in handle.keys()}  # noqa: SIM118  (it is not a dict)
        header = {
            name: TensorInfo(file, tuple(found.get_shape()), str(found.get_dtype())) for name, found in slices.items()
        }
    return header
