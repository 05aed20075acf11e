"""The next token of each row of a draft, compiled: the largest, a race's winner, or drawn from a law that is sent.

Part of a recorded chain of drafts (engine/sampling/cpu_chains): a row's token is written where the next forward
reads it. The rules are those of drafting/growth. Needs numba.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numba import carray, njit

from outrider.kernels.cpu import record
from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.row_laws.cpu import (
    CHUNK,
    doubles_at,
    exp,
    find_maxima,
    floats_at,
    integers_at,
    keep,
    likeliest,
    likeliest_first,
    log_weight,
    race,
    race_kept,
)

NOTHING, LARGEST, RACE, LAW = range(4)


class DrawTables(NamedTuple):
    """The rules and numbers by which S rows are drawn; each row's numbers are read when the kernel runs.

    rules: int64 [S], of NOTHING to LAW. numbers: float64 [S, 4]: temperature, top-k, top-p, min-p. key_words: int64
    [S, 2]: of a race. places: int64 [S], in [0, total of a law).
    """

    rules: torch.Tensor
    numbers: torch.Tensor
    key_words: torch.Tensor
    places: torch.Tensor


class Drawn(NamedTuple):
    """The tokens drawn for S rows, and their laws."""

    token_ids: torch.Tensor  # int64 [S]; -1: the row has no finite logit
    next_ids: torch.Tensor  # int64 [S]; token_ids with 0 for -1
    law_ids: torch.Tensor  # int64 [S, K]
    law_counts: torch.Tensor  # int64 [S, K]
    law_sizes: torch.Tensor  # int64 [S]


class _Fields(NamedTuple):
    logits: int
    row_bytes: int
    vocab_size: int
    ids: int  # int64 [vocab_size]: the token ids of the logits; 0: their places
    rules: int
    numbers: int
    key_words: int
    places: int
    token_ids: int
    next_ids: int
    law_ids: int
    law_counts: int
    law_sizes: int
    law_width: int
    law_total: int
    scratch: int
    scratch_bytes: int  # of a thread


_Record, _Call = record.record_types(_Fields)


@njit
def _first_largest(logits, largest, maxima):  # type: ignore[no-untyped-def]
    for chunk in range(len(maxima)):
        if maxima[chunk] >= largest:
            for token in range(chunk * CHUNK, min(len(logits), chunk * CHUNK + CHUNK)):
                if logits[token] >= largest:
                    return token
    return -1


@njit
def _draw_from_law(call, row, logits, tokens, largest, temperature, ids):  # type: ignore[no-untyped-def]
    """Writes the law of `tokens`, likeliest first; returns the token at the row's place in it."""
    width = call.law_width
    law_ids = integers_at(call.law_ids + 8 * row * width, width)
    law_counts = integers_at(call.law_counts + 8 * row * width, width)
    place = integers_at(call.places + 8 * row, 1)[0]
    total = 0.0
    for token in tokens:
        total += exp(log_weight(logits[token], largest, temperature))
    # Kept apart from the output, to which a unit may write final values alone.
    counts = np.empty(len(tokens), np.int64)
    left = call.law_total
    for index in range(len(tokens)):
        share = exp(log_weight(logits[tokens[index]], largest, temperature)) / total * call.law_total
        counts[index] = np.int64(share)
        left -= counts[index]
    size, drawn, before = 0, -1, 0
    for index in range(len(tokens)):
        count = counts[index] + (left if index == 0 else 0)
        if count > 0:
            law_ids[size] = ids[tokens[index]] if len(ids) else tokens[index]
            law_counts[size] = count
            size += 1
            if before <= place < before + count:
                drawn = tokens[index]
            before += count
    integers_at(call.law_sizes + 8 * row, 1)[0] = size
    return drawn


@njit
def _draw(address, row, thread):  # type: ignore[no-untyped-def]
    call = carray(address, 1, _Call)[0]
    size, rule = call.vocab_size, integers_at(call.rules + 8 * row, 1)[0]
    token = -1
    ids = integers_at(call.ids, size if call.ids else 0)
    if rule != NOTHING:
        scratch, num_chunks = call.scratch + thread * call.scratch_bytes, (size + CHUNK - 1) // CHUNK
        weights, sums = doubles_at(scratch, size), doubles_at(scratch + 8 * size, num_chunks)
        maxima = floats_at(scratch + 8 * (size + num_chunks), num_chunks)
        logits = floats_at(call.logits + row * call.row_bytes, size)
        numbers = doubles_at(call.numbers + 32 * row, 4)
        temperature, top_k, top_p, min_p = numbers[0], np.int64(numbers[1]), numbers[2], numbers[3]
        largest = find_maxima(logits, maxima)
        is_cut = top_k > 0 or top_p < 1.0 or min_p > 0.0
        if not largest > -np.inf:
            token = -1
        elif rule == LARGEST:
            token = _first_largest(logits, largest, maxima)
        elif rule == RACE:
            words = integers_at(call.key_words + 16 * row, 2)
            low, high = np.uint32(words[0]), np.uint32(words[1])
            if is_cut:
                kept = keep(logits, largest, maxima, temperature, top_k, top_p, min_p, weights, sums)
                token = race_kept(logits, kept, largest, temperature, ids, low, high)
            else:
                token = race(logits, largest, maxima, temperature, ids, low, high)
        elif is_cut:
            kept = keep(logits, largest, maxima, temperature, top_k, top_p, min_p, weights, sums)
            first = likeliest_first(logits, kept)[: call.law_width]
            token = _draw_from_law(call, row, logits, first, largest, temperature, ids)
        else:
            first = likeliest(logits, largest, temperature, maxima, call.law_width)
            token = _draw_from_law(call, row, logits, first, largest, temperature, ids)
    if token >= 0 and len(ids):
        token = ids[token]
    integers_at(call.token_ids + 8 * row, 1)[0] = token
    integers_at(call.next_ids + 8 * row, 1)[0] = max(token, 0)


def draw(
    logits: torch.Tensor, tables: DrawTables, out: Drawn, *, target_ids: torch.Tensor | None, law_total: int
) -> None:
    """A token for each of the rows of logits float32 [S, V]. target_ids: int64 [V], the tokens' ids; None: as they are.

    Raises KernelArgumentError.
    """
    num_rows, vocab_size = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise KernelArgumentError(f"logits must be float32 with contiguous rows, not {logits.dtype}")
    for tensor, shape in zip(tables, ((num_rows,), (num_rows, 4), (num_rows, 2), (num_rows,)), strict=True):
        if tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise KernelArgumentError(f"a table is {list(tensor.shape)}, not contiguous {list(shape)}")
    num_chunks = -(-vocab_size // CHUNK)
    scratch_bytes = -(-(8 * (vocab_size + num_chunks) + 4 * num_chunks) // 4096) * 4096
    threads = max(1, min(torch.get_num_threads(), num_rows))
    call = _Record(
        logits.data_ptr(), 4 * logits.stride(0), vocab_size, 0 if target_ids is None else target_ids.data_ptr(),
        *(tensor.data_ptr() for tensor in tables), *(tensor.data_ptr() for tensor in out),
        out.law_ids.shape[1], law_total, cpu_team.scratch(scratch_bytes, threads), scratch_bytes,
    )  # fmt: skip
    kept = (tables, target_ids)
    cpu_team.run(cpu_team.Work(_draw, call, tuple(out), (logits,), num_rows, threads, keeps=kept))
