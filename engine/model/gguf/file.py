"""A GGUF file, or its parts, mapped: metadata that records which values were read, and tensors by name.

Not here: what the metadata means (config), which parameter a tensor is (tensors).
"""

from __future__ import annotations

import functools
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np

from outrider.engine.errors import ModelRefused

# elements; longest array of the metadata that is read when the vocabulary is not needed; longer ones are the
# vocabulary's
_LONGEST_ARRAY = 4096
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


def parts_of(file: Path) -> list[Path]:
    """Returns the file, or all parts of the model whose first part it is. Raises ModelRefused if one is missing."""
    match = _PART.search(file.name)
    if match is None:
        return [file]
    stem, count = file.name[: match.start()], int(match[2])
    parts = [file.with_name(f"{stem}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
    missing = [part.name for part in parts if not part.is_file()]
    if missing:
        raise ModelRefused(str(file), f"{', '.join(missing)} of its {count} parts is missing", "download all parts")
    return parts


@functools.cache
def _reader_without_long_arrays() -> Any:
    """Returns a reader that skips long arrays: gguf-py's objects of 150,000 tokens take 500 MB and many seconds."""
    from gguf import GGUFReader, GGUFValueType

    class Reader(GGUFReader):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            if raw_type != GGUFValueType.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            data: Any = self.data
            of_type, count = struct.unpack_from("<IQ", data, orig_offs)
            if count <= _LONGEST_ARRAY:
                return super()._get_field_parts(orig_offs, raw_type)
            end = orig_offs + struct.calcsize("<IQ")
            if of_type == GGUFValueType.STRING:
                for _ in range(count):
                    end += 8 + struct.unpack_from("<Q", data, end)[0]
            else:
                end += count * np.dtype(self.gguf_scalar_to_np[GGUFValueType(of_type)]).itemsize
            return end - orig_offs, [], [], [GGUFValueType.ARRAY]

    return Reader


class GgufFile:
    """The files of one model. `tensors`: name -> gguf.ReaderTensor."""

    def __init__(self, path: str, files: list[Path], *, has_vocabulary: bool = True) -> None:
        """Maps the files.

        has_vocabulary=False: long arrays of the metadata are left out. Raises ModelRefused if the files are not GGUF,
        damaged or incomplete.
        """
        from gguf import GGUFReader

        reader_class = GGUFReader if has_vocabulary else _reader_without_long_arrays()
        self.path = path
        self.tensors: dict[str, Any] = {}
        self._read: set[str] = set()
        try:
            readers = [reader_class(file) for file in files]
            for tensor in (tensor for reader in readers for tensor in reader.tensors):
                self.tensors[tensor.name] = tensor
        except (OSError, ValueError, KeyError, IndexError, struct.error) as error:
            raise ModelRefused(path, f"it cannot be read as GGUF: {error}", "download it again") from error
        self._fields = readers[0].fields
        self.architecture = str(self.general("general.architecture"))
        count = self.general("split.tensors.count", len(self.tensors))
        if count != len(self.tensors):
            raise ModelRefused(path, f"it has {len(self.tensors)} tensors, not {count}", "download all parts")

    def general(self, key: str, default: Any = None) -> Any:
        """Returns a value by its full name, or the default if it is not there."""
        return self._fields[key].contents() if key in self._fields else default

    def own(self, key: str, default: Any = None) -> Any:
        """Returns a value of the architecture's, e.g. "block_count".

        Raises ModelRefused if there is neither a value nor a default.
        """
        self._read.add(key)
        found = self.general(f"{self.architecture}.{key}", default)
        if found is None:
            raise self.not_read(f"its metadata has no {self.architecture}.{key}")
        return found

    def uniform(self, key: str, default: Any = None) -> Any:
        """Returns a number that the file may have for each layer, with 0 where it does not apply to a layer. Raises
        ModelRefused if the layers differ, or if it is not there."""
        found = self.own(key, default)
        numbers = set(found) - {0} if isinstance(found, list) else {found}
        if len(numbers) != 1:
            raise self.not_read(f"its {self.architecture}.{key} is {found}, not one number; that is not read")
        return numbers.pop()

    @property
    def num_layers(self) -> int:
        """Counts the layers, without those for multi-token prediction, which come last. Raises ModelRefused."""
        return int(self.own("block_count") - self.own("nextn_predict_layers", 0))

    def not_read(self, cause: str) -> ModelRefused:
        """Returns the refusal of a file with something that is not read."""
        return ModelRefused(self.path, cause, "serve the checkpoint that it was made from, as a folder")

    def require(self, key: str, *meant: Any) -> None:
        """Raises ModelRefused when the value is there and is none of these."""
        found = self.own(key, meant[0])
        if found not in meant:
            raise self.not_read(f"its {self.architecture}.{key} is {found!r}, which is not read")

    def require_all_read(self) -> None:
        """Raises ModelRefused for a value of the architecture's that no rule has read."""
        prefix = f"{self.architecture}."
        own = {key.removeprefix(prefix) for key in self._fields if key.startswith(prefix)}
        if own - self._read:
            raise self.not_read(f"its metadata has {prefix}{min(own - self._read)}, which is not read")
