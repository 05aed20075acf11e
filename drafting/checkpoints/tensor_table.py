"""The tensors of a checkpoint folder: names, shapes and types without loading them, then single tensors.

Not here: the files (engine/model/weight_files.py), which tensors a head needs (the loaders, fill_module.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing
from outrider.engine.model.gguf.file import GgufFile
from outrider.engine.model.gguf.tensors import gguf_tensors
from outrider.engine.model.weight_files import FLOAT_TYPES, StoredTensor, stored_tensors
from outrider.shared.checkpoint.file_names import linked_parts

INTEGER_TYPES = frozenset({"I32", "I64"})


class TensorTable:
    """All tensors of a folder by name."""

    def __init__(self, folder: Path, tensors: Mapping[str, StoredTensor]) -> None:
        self.folder = folder
        self.tensors = tensors

    @classmethod
    def read(cls, folder: Path) -> TensorTable:
        """Memory-maps the folder's files.

        Raises CheckpointRefused when the folder has no file of weights, or one is damaged, missing or not of plain
        tensors.
        """
        if not folder.is_dir():
            raise CheckpointRefused(folder, "the folder does not exist", "download the checkpoint and name its folder")
        with refusing(folder, "reading its tensors"):
            parts = linked_parts(folder)
            return cls(folder, gguf_tensors(GgufFile(str(folder), parts)) if parts else stored_tensors(folder))

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns a tensor's shape. Raises CheckpointRefused for an unknown tensor."""
        if name not in self.tensors:
            raise CheckpointRefused(self.folder, f"tensor {name} is missing; there are {self.summary()}")
        return self.tensors[name].shape

    def floats(self, name: str, dtype: torch.dtype | None) -> torch.Tensor:
        """Reads a tensor of finite numbers, as `dtype` (None: as stored, but float64 and float16 as float32)."""
        info = self.tensors[name]
        if not info.is_float:
            cause = f"tensor {name} is stored as {info.stored_type}, not as one of {', '.join(sorted(FLOAT_TYPES))}"
            raise CheckpointRefused(self.folder, cause, "use an unquantised checkpoint")
        tensor = self._read(name)
        if dtype is None:
            dtype = torch.bfloat16 if info.stored_type == "BF16" else torch.float32
        tensor = tensor.to(dtype)
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointRefused(self.folder, f"tensor {name} has values that are not finite in {dtype}")
        return tensor

    def integers(self, name: str) -> torch.Tensor:
        """Reads a tensor of whole numbers, as int64."""
        info = self.tensors[name]
        if info.stored_type not in INTEGER_TYPES:
            cause = f"tensor {name} is stored as {info.stored_type}, not as one of {', '.join(sorted(INTEGER_TYPES))}"
            raise CheckpointRefused(self.folder, cause)
        return self._read(name).to(torch.int64)

    def summary(self) -> str:
        """Lists a few names, for messages."""
        names = sorted(self.tensors)
        return ", ".join(names[:8]) + (f", ... ({len(names)} in all)" if len(names) > 8 else "")

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.tensors[name]
        with refusing(tensor.file, f"reading tensor {name}"):
            return tensor.read()
