"""Training rows for draft heads: files in, batches out; each batch is a function of (data, seed, index) alone.

Reads JSONL from `prepare-data` (the server's token ids, else the target's tokenizer), JSONL or text documents, `.npy`
int[rows, length], and `.bin` uint16 streams of `models.make.tokenizer`. Samples longer than `seq_len` are cut into
independent windows; short ones are batched by length and padded on the right. Not here: objectives (training.heads).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.utils.rnn import pad_sequence

from outrider.drafting.recorded_states import RecordedStates, StatesPlace
from outrider.training.data.jsonl_file import parse_line
from outrider.training.errors import DataError
from outrider.training.heads.interface import Batch

# tokens; shortest window; depth 0 needs three: a prefix, the token the target predicts, and the draft token
MIN_WINDOW = 4
# batches; windows of similar length are batched within pools of this size, which keeps padding small
_POOL_BATCHES = 32
_SUFFIXES = (".jsonl", ".txt", ".npy", ".bin")

Encode = Callable[[dict[str, Any]], tuple[list[int], int]]
Sample = tuple[npt.NDArray[np.int32], int]


@dataclass(frozen=True)
class WindowStates:
    """Recorded hidden states of windows: of window i those of a session, from its position `firsts[i]` on."""

    recorded: RecordedStates
    places: tuple[StatesPlace, ...]
    firsts: tuple[int, ...]

    def rows(self, number: int, num_tokens: int) -> torch.Tensor:
        """Returns the rows [num_tokens, L*H] of window `number`."""
        first = self.firsts[number]
        return self.recorded.read(self.places[number], first, first + num_tokens)


@dataclass(frozen=True)
class TokenWindows:
    """All windows, flat: window i is `token_ids[starts[i]:ends[i]]`; tokens before `count_from[i]` are prompt.

    states: where there are recorded hidden states, for each window. num_without: windows left out for lack of them.
    """

    token_ids: npt.NDArray[np.int32]
    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    count_from: npt.NDArray[np.int64]
    states: WindowStates | None = None
    num_without: int = 0

    def __len__(self) -> int:
        return len(self.starts)

    def fingerprint(self) -> str:
        """Returns a short hash of all data: a resumed run must see the same."""
        digest = hashlib.sha256()
        for array in (self.token_ids, self.starts, self.ends, self.count_from):
            digest.update(np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:16]

    def token_counts(self, vocab_size: int) -> npt.NDArray[np.int64]:
        """Returns int64[vocab]: how often each token is a draft position's label."""
        counts = np.zeros(vocab_size, dtype=np.int64)
        for start, end, first in zip(self.starts, self.ends, self.count_from, strict=True):
            counts += np.bincount(self.token_ids[start + first : end], minlength=vocab_size)
        return counts


def load_windows(
    files: Sequence[Path],
    encode: Encode,
    vocab_size: int,
    seq_len: int,
    count_prompts: bool = False,
    recorded: RecordedStates | None = None,
) -> TokenWindows:
    """Reads all files, in order. `encode` turns a JSONL row without ids into (ids, length of its prompt).

    recorded: where given, samples without recorded hidden states are left out.
    Raises DataError with the file (and line) that is missing, malformed, or has an id outside [0, vocab_size).
    """
    if seq_len < MIN_WINDOW:
        raise DataError(f"sequence length {seq_len}: must be at least {MIN_WINDOW}")
    pieces: list[npt.NDArray[np.int32]] = []
    bounds: list[tuple[int, int, int]] = []
    places: list[tuple[StatesPlace, int]] = []
    offset = num_without = 0
    for path in files:
        for ids, prompt_len in _samples(path, encode, seq_len):
            if len(ids) and not (0 <= int(ids.min()) and int(ids.max()) < vocab_size):
                raise DataError(
                    f"{path}: token id {int(ids.max())} is outside the target's vocabulary [0, {vocab_size})"
                )
            place = None if recorded is None else recorded.find(ids)
            if recorded is not None and place is None:
                num_without += 1
                continue
            first = 0 if count_prompts else prompt_len
            for start in range(0, len(ids), seq_len):
                end = min(start + seq_len, len(ids))
                # A window of only prompt tokens has no labels.
                if end - start >= MIN_WINDOW and first < end:
                    bounds.append((offset + start, offset + end, max(0, first - start)))
                    if place is not None:
                        places.append((place, start))
            pieces.append(ids)
            offset += len(ids)
    if not bounds:
        lack = f" with recorded hidden states ({num_without} without)" if num_without else ""
        raise DataError(f"{', '.join(map(str, files))}: no sample of at least {MIN_WINDOW} tokens{lack}")
    starts, ends, count_from = (np.array(column, dtype=np.int64) for column in zip(*bounds, strict=True))
    states = None
    if recorded is not None:
        states = WindowStates(recorded, tuple(place for place, _ in places), tuple(first for _, first in places))
    return TokenWindows(np.concatenate(pieces), starts, ends, count_from, states, num_without)


def _samples(path: Path, encode: Encode, seq_len: int) -> Iterator[Sample]:
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    if path.suffix == ".jsonl":
        yield from _jsonl_samples(path, encode)
    elif path.suffix == ".txt":
        yield _encoded({"text": path.read_text(encoding="utf-8")}, encode)
    elif path.suffix == ".npy":
        yield from _npy_samples(path)
    elif path.suffix == ".bin":
        stream = np.fromfile(path, dtype=np.uint16).astype(np.int32)
        yield from ((stream[start : start + seq_len], 0) for start in range(0, len(stream), seq_len))
    else:
        raise DataError(f"{path}: unknown file type; must be one of {', '.join(_SUFFIXES)}")


def _npy_samples(path: Path) -> Iterator[Sample]:
    try:
        rows = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} is not a .npy file: {error}") from error
    if rows.ndim != 2 or not np.issubdtype(rows.dtype, np.integer):
        raise DataError(f"{path}: must be integers [rows, length], not {rows.dtype}{list(rows.shape)}")
    yield from ((row.astype(np.int32), 0) for row in rows)


def _jsonl_samples(path: Path, encode: Encode) -> Iterator[Sample]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row = {"text": json.loads(line)} if line.lstrip().startswith(b'"') else parse_line(path, number, line)
            try:
                yield _sample_of_row(row, encode)
            except DataError as error:
                raise DataError(f"{path}, line {number}: {error}") from error


def _sample_of_row(row: dict[str, Any], encode: Encode) -> Sample:
    prompt_ids = row.get("prompt_token_ids")
    if prompt_ids is None and isinstance(row.get("prompt"), list):
        prompt_ids = row["prompt"]
    if prompt_ids is None or row.get("token_ids") is None:
        return _encoded(row, encode)
    ids = [*prompt_ids, *row["token_ids"]]
    if not all(type(token_id) is int for token_id in ids):
        raise DataError("prompt_token_ids and token_ids must be lists of whole numbers")
    return np.array(ids, dtype=np.int64).clip(-1, 2**31 - 1).astype(np.int32), len(prompt_ids)


def _encoded(row: dict[str, Any], encode: Encode) -> Sample:
    ids, prompt_len = encode(row)
    return np.array(ids, dtype=np.int32), prompt_len


class BatchSource:
    """Batches of all windows, reshuffled every epoch. Raises DataError when they do not fill one batch."""

    def __init__(self, windows: TokenWindows, batch_size: int, seed: int) -> None:
        self.windows, self.batch_size, self.seed = windows, batch_size, seed
        self.batches_per_epoch = len(windows) // batch_size
        if self.batches_per_epoch < 1:
            raise DataError(f"{len(windows)} windows do not fill one batch of {batch_size}")
        self._epoch_order = lru_cache(maxsize=2)(self._order)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        """Returns int64[batches_per_epoch, batch_size]: window numbers."""
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(self.windows))[: self.batches_per_epoch * self.batch_size]
        lengths = self.windows.ends - self.windows.starts
        pool = _POOL_BATCHES * self.batch_size
        pools = [order[start : start + pool] for start in range(0, len(order), pool)]
        # Stable: windows of equal length stay in random order.
        by_length = np.concatenate([part[np.argsort(lengths[part], kind="stable")] for part in pools])
        batches: npt.NDArray[np.int64] = by_length.reshape(-1, self.batch_size)
        return batches[rng.permutation(len(batches))]

    def batch(self, index: int) -> Batch:
        """Returns batch `index` of the endless sequence, padded with id 0 to its longest window."""
        epoch, place = divmod(index, self.batches_per_epoch)
        return make_batch(self.windows, self._epoch_order(epoch)[place])


def make_batch(windows: TokenWindows, numbers: npt.NDArray[np.int64]) -> Batch:
    """Returns the windows with these numbers as one batch."""
    spans = [slice(windows.starts[number], windows.ends[number]) for number in numbers]
    texts = [torch.from_numpy(windows.token_ids[span].astype(np.int64)) for span in spans]
    batch = Batch.padded(texts, windows.count_from[numbers].tolist())
    states = windows.states
    if states is None:
        return batch
    rows = [states.rows(int(number), len(text)) for number, text in zip(numbers, texts, strict=True)]
    return replace(batch, rows=pad_sequence(rows, batch_first=True), row_layers=states.recorded.layers)
