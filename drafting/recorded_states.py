"""Hidden states of whole sessions in files: written while a target serves, read when a head is trained on its answers.

A file is safetensors. Its sessions stand one after another:

    token_ids   int32 [N]         prompt and output, as far as they are computed
    lengths     int64 [S]         positions per session, N together
    rows        dtype [N, L*H]    hidden states of the layers, in their order; the last layer is the final norm's output

with the metadata `layers` ("2,12,21,24", HF numbering) and `weights` (the digest of the target's weights).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from outrider.drafting.heads.eagle3 import default_feature_layers
from outrider.shared.errors import ConfigError

_PATTERN = "states-*.safetensors"


@dataclass(frozen=True)
class RecordedSession:
    """token_ids int32[N]; rows [N, L*H]."""

    token_ids: npt.NDArray[np.int32]
    rows: torch.Tensor


@dataclass(frozen=True)
class StatesPlace:
    """Where a session's rows are: the file's number, and their range in it."""

    file: int
    start: int
    end: int


def recorded_layers(num_layers: int) -> tuple[int, ...]:
    """Returns the layers that a verifier records of a target: those that EAGLE-3 reads by default, and the last."""
    return tuple(dict.fromkeys((*default_feature_layers(num_layers), num_layers)))


def write_states(path: Path, sessions: Sequence[RecordedSession], layers: Sequence[int], weights: str) -> None:
    """Writes one file, whole or not at all. Raises OSError."""
    unfinished = path.with_suffix(".part")
    tensors = {
        "token_ids": torch.from_numpy(np.concatenate([session.token_ids for session in sessions])),
        "lengths": torch.tensor([len(session.token_ids) for session in sessions]),
        "rows": torch.cat([session.rows for session in sessions]),
    }
    save_file(tensors, unfinished, metadata={"layers": ",".join(map(str, layers)), "weights": weights})
    unfinished.rename(path)


def next_path(folder: Path) -> Path:
    """Returns a name that no file of the folder has and that sorts after all of them."""
    numbers = [int(path.stem.removeprefix("states-")) for path in _files(folder)]
    return folder / f"states-{max(numbers, default=0) + 1:06d}.safetensors"


class RecordedStates:
    """The sessions of a folder, found by their tokens; rows stay in the files until they are read."""

    def __init__(self, folder: Path, weights: str) -> None:
        """weights: the digest that the target must have. Raises ConfigError that names the file that does not fit."""
        self._folder, self._files = folder, _files(folder)
        if not self._files:
            raise ConfigError(f"{folder} has no {_PATTERN}; record some with --record-hidden-states")
        self.layers: tuple[int, ...] = ()
        self._places: dict[bytes, StatesPlace] = {}
        self._rows: dict[int, Any] = {}
        for number, path in enumerate(self._files):
            self._index(number, path, weights)

    def __len__(self) -> int:
        return len(self._places)

    def find(self, token_ids: npt.NDArray[np.int32]) -> StatesPlace | None:
        """Returns the rows of a text, of all its tokens or all but the last, which need not have been computed."""
        return self._places.get(_key(token_ids)) or self._places.get(_key(token_ids[:-1]))

    def read(self, place: StatesPlace, start: int, end: int) -> torch.Tensor:
        """Returns rows [end - start, L*H] of the session's positions from `start` on; zeros past its last."""
        stop = min(place.start + end, place.end)
        rows: torch.Tensor = self._open(place.file)[place.start + start : stop]
        missing = end - start - len(rows)
        return rows if missing <= 0 else torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])

    def _index(self, number: int, path: Path, weights: str) -> None:
        try:
            with _opened(path) as file:
                metadata = file.metadata() or {}
                layers = tuple(int(layer) for layer in metadata["layers"].split(","))
                token_ids, lengths = file.get_tensor("token_ids").numpy(), file.get_tensor("lengths").tolist()
                num_rows = file.get_slice("rows").get_shape()[0]
        except (SafetensorError, OSError, KeyError, ValueError) as error:
            raise ConfigError(f"{path} is no file of recorded hidden states: {error}; remove it") from error
        if metadata.get("weights") != weights:
            raise ConfigError(f"{path} was recorded with another target's weights; record again, or remove it")
        if self.layers not in ((), layers):
            raise ConfigError(f"{path} has hidden layers {list(layers)}, other files {list(self.layers)}")
        if not (token_ids.dtype == np.int32 and min(lengths, default=0) >= 0):
            raise ConfigError(f"{path} is no file of recorded hidden states: wrong types; remove it")
        if not sum(lengths) == len(token_ids) == num_rows:
            raise ConfigError(f"{path} is no file of recorded hidden states: its lengths disagree; remove it")
        self.layers, start = layers, 0
        for length in lengths:
            self._places[_key(token_ids[start : start + length])] = StatesPlace(number, start, start + length)
            start += length

    def _open(self, number: int) -> Any:
        if number not in self._rows:
            self._rows[number] = _opened(self._files[number]).get_slice("rows")
        return self._rows[number]


def _opened(path: Path) -> Any:
    return safe_open(path, "pt")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(_PATTERN) if path.stem.removeprefix("states-").isdecimal())


def _key(token_ids: npt.NDArray[np.int32]) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(token_ids, dtype=np.int32).tobytes(), digest_size=16).digest()
