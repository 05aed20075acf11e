"""Batches for the tests of the paged kernels: sessions laid out over scattered blocks, everything else poisoned."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.kernels.kv_codes.layout import head_bytes, parts_of, view_codes
from outrider.kernels.kv_codes.reference import encode
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window1": {"sliding_window": 1},
    "window37": {"sliding_window": 37},
    "chunk1": {"chunk_size": 1},
    "chunk37": {"chunk_size": 37},
    "softcap": {"softcap": 2.5},
    "sinks": {"sinks": "draw"},
    "all": {"sliding_window": 70, "softcap": 5.0, "sinks": "draw"},
    "all-chunked": {"chunk_size": 64, "softcap": 5.0, "sinks": "draw"},
}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    value_dim: int = 64
    dtype: torch.dtype = torch.float32
    code_dtype: torch.dtype | None = None  # of a coded cache


@dataclass(frozen=True)
class Session:
    """keys and values [context + rows, ...] in cache order; queries [rows, ...]; parents [rows], relative."""

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    tree_start: int
    parents: tuple[int, ...]

    @property
    def num_rows(self) -> int:
        return self.queries.shape[0]

    @property
    def context_len(self) -> int:
        return self.keys.shape[0] - self.num_rows


def random_session(shape: Shape, context_len: int, num_rows: int, seed: int, tree_start: int | None = None) -> Session:
    """A session of random tokens; from tree_start on, each row hangs below a random earlier one."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, heads: int, dim: int, spread: float) -> torch.Tensor:
        return (torch.randn(length, heads, dim, generator=generator) * spread).to(shape.dtype)

    start = num_rows if tree_start is None else tree_start
    parents = [
        int(torch.randint(max(start - 1, 0) if start else -1, row, (1,), generator=generator))
        if row >= start
        else row - 1
        for row in range(num_rows)
    ]
    return Session(
        queries=draw(num_rows, shape.num_heads, shape.head_dim, 2.0),
        keys=draw(context_len + num_rows, shape.num_kv_heads, shape.head_dim, 1.0),
        values=draw(context_len + num_rows, shape.num_kv_heads, shape.value_dim, 1.0),
        tree_start=start,
        parents=tuple(parents),
    )


def chain(whole: Session, first: int, last: int) -> Session:
    """Positions [first, last) of a session that is one chain from position 0, as rows on a cached context."""
    return dataclasses.replace(
        whole,
        queries=whole.queries[first:last],
        keys=whole.keys[:last],
        values=whole.values[:last],
        tree_start=last - first,
        parents=tuple(range(-1, last - first - 1)),
    )


def empty_codes(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """A coded cache of poison: NaN, as e4m3 codes and as scales."""
    *places, block_size, dim = shape
    memory = torch.full((*places, head_bytes(block_size, dim)), 0xFF, dtype=torch.uint8, device=device)
    return view_codes(memory, block_size, dim, dtype)


def coded(cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A coded cache with the rows of another, by the reference; a row with a NaN is poison here too."""
    codes = empty_codes(cache.shape, dtype)
    found, scales = encode(cache, dtype)
    for part, rows in zip(parts_of(codes), (found.view(torch.uint8), scales), strict=True):
        part.copy_(rows)
    return codes


def lay_out(sessions: list[Session], shape: Shape, block_size: int = 16, seed: int = 0) -> dict[str, Any]:
    """Arguments of `run_kernel`; unused slots and blocks are NaN, unused table entries name no block."""
    generator = torch.Generator().manual_seed(seed)
    needed = [math.ceil(session.keys.shape[0] / block_size) for session in sessions]
    num_blocks = sum(needed) + 3
    blocks = torch.randperm(num_blocks, generator=generator).tolist()
    tables = torch.full((len(sessions), max(needed, default=0) + 1), -1, dtype=torch.int32)
    cache = (num_blocks, shape.num_kv_heads, block_size)
    key_cache = torch.full((*cache, shape.head_dim), torch.nan, dtype=shape.dtype)
    value_cache = torch.full((*cache, shape.value_dim), torch.nan, dtype=shape.dtype)
    for index, session in enumerate(sessions):
        for nth in range(needed[index]):
            block, part = blocks.pop(), slice(nth * block_size, (nth + 1) * block_size)
            tables[index, nth] = block
            filled = session.keys[part].shape[0]
            key_cache[block, :, :filled] = session.keys[part].transpose(0, 1)
            value_cache[block, :, :filled] = session.values[part].transpose(0, 1)
    if shape.code_dtype is not None:
        key_cache, value_cache = coded(key_cache, shape.code_dtype), coded(value_cache, shape.code_dtype)
    starts = [0]
    for session in sessions:
        starts.append(starts[-1] + session.num_rows)
    empty = torch.empty((0, shape.num_heads, shape.head_dim), dtype=shape.dtype)
    return {
        "query": torch.cat([empty, *(session.queries for session in sessions)]),
        "key_cache": key_cache,
        "value_cache": value_cache,
        "block_tables": tables,
        "context_lens": torch.tensor([session.context_len for session in sessions], dtype=torch.int32),
        "query_starts": torch.tensor(starts, dtype=torch.int32),
        "tree_starts": torch.tensor([session.tree_start for session in sessions], dtype=torch.int32),
        "parents": torch.tensor([p for session in sessions for p in session.parents], dtype=torch.int32),
        "scaling": shape.head_dim**-0.5,
    }


def run_kernel(
    kernel: Callable[..., torch.Tensor],
    arguments: Mapping[str, Any],
    scoring: Mapping[str, Any] | None = None,
    **options: Any,
) -> torch.Tensor:
    """A paged attention kernel on `lay_out`'s arguments; scoring: further fields of Scoring."""
    fields = dict(arguments) | dict(scoring or {})
    tensors = [fields.pop(name) for name in ("query", "key_cache", "value_cache")]
    tables = BatchTables(*(fields.pop(name) for name in BatchTables._fields))
    return kernel(*tensors, tables, Scoring(**fields), **options)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    assert not tensor.isnan().any()
    return tensor.contiguous().view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)
