"""Attention over a paged cache on the CPU: the fast one, and row-invariant to the bit.

This half checks the arguments, cuts the work into items and hands them to the threads; `cpu_items` and
`cpu_tiles` are compiled. A row's output bits depend on its query, on the keys and values it sees in logical
order and on its logical position, and on nothing else: see `cpu_tiles`.

Needs numba. The first call in a process compiles (about 10 s) or loads what was compiled before.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from kernels import cpu_team, panel, simd
from kernels.errors import KernelArgumentError
from kernels.paged_attention import cpu_items, cpu_tiles
from kernels.paged_attention.cpu_items import run_items
from kernels.paged_attention.cpu_tiles import ERROR_BLOCK, ERROR_PARENT, TILE, Call

# Rows of queries times heads of a group that share each tile they load.
MAX_PACKED_ROWS = 64
# Below this number of score elements a second thread costs more than it brings.
MIN_PARALLEL_SCORES = 4096
_ERRORS = {
    ERROR_BLOCK: "block_tables names a block outside the cache",
    ERROR_PARENT: "a row of a tree stands below itself or a later row",
}


class _Scratch(threading.local):
    """Working memory, kept between calls; one per calling thread, so that calls may run side by side."""

    def __init__(self) -> None:
        self.memory = np.empty(0, np.float32)

    def at_least(self, num_bytes: int) -> int:
        """Address of num_bytes bytes, aligned to 64."""
        if self.memory.nbytes < num_bytes + 64:
            self.memory = np.empty((num_bytes + 64) // 4, np.float32)
        return -(-int(self.memory.ctypes.data) // 64) * 64


_scratch = _Scratch()


def _make_entry(digest: int) -> Callable[[Any], None]:
    def entry(address):  # type: ignore[no-untyped-def]
        if digest >= 0:
            run_items(address)

    return entry


@functools.cache
def _entry() -> int:
    return cpu_team.compile_entry(_make_entry, (simd, panel, cpu_tiles, cpu_items))


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    tree_starts: torch.Tensor,
    parents: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    num_threads: int | None = None,
    team: cpu_team.ThreadTeam | None = None,
) -> torch.Tensor:
    """Attend query [T, Hq, D] to its cached context; returns [T, Hq, Dv] in the dtype of query.

    Arguments as in `reference`; query and the caches are bf16 or fp32, computed in fp32, D and Dv >= 16.
    num_threads: by default as many as torch uses. Raises KernelArgumentError.
    """
    call, kept = _describe(query, key_cache, value_cache, scaling, sliding_window, softcap, sinks)
    _check_sessions(query, block_tables, context_lens, query_starts, tree_starts, parents)
    out = torch.empty((*query.shape[:2], value_cache.shape[3]), dtype=query.dtype)
    tables = [t.contiguous() for t in (block_tables, context_lens, query_starts, tree_starts, parents)]
    num_items, num_scores = _cut_items(call, kept, tables, key_cache.shape[2])
    if num_items == 0:
        return out
    counters = np.zeros(3, np.int64)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    threads = 1 if num_scores * query.shape[1] < MIN_PARALLEL_SCORES else max(1, min(threads, num_items))
    names = ("block_tables", "context_lens", "query_starts", "tree_starts", "parents")
    for name, tensor in zip(names, tables, strict=True):
        call[name] = tensor.data_ptr()
    call["out"], call["counters"] = out.data_ptr(), counters.ctypes.data
    _place_scratch(call, threads)
    run = cpu_team.run_here if threads == 1 else (team or cpu_team.default_team())
    record = np.array([tuple(call[name] for name in Call.names)], Call)
    run(_entry(), record.ctypes.data, threads)
    if counters[2]:
        raise KernelArgumentError(_ERRORS[int(counters[2])])
    return out
