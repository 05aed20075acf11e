"""Paged attention at 32 sessions of 4,096 positions, against the time that reading their keys and values takes.

Heads of a Llama-8B, bf16, blocks scattered over the cache. 537 MB, which no cache holds: nothing has to be rotated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

import torch

from benchmarks.gpu_report.report import Finding, Part, Run, judged
from benchmarks.gpu_report.timing import copy_bandwidth, graph_us
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring
from outrider.kernels.paged_attention.triton import paged_attention

MOST_TIMES_FLOOR = 1.25
_NUM_SESSIONS, _LENGTH, _BLOCK_SIZE = 32, 4096, 16
_NUM_HEADS, _NUM_KV_HEADS, _DIM = 32, 8, 128


def attention_call(num_rows: int) -> tuple[Callable[[], object], int]:
    """Attention of the last num_rows rows of each session, and the bytes of keys and values that it reads."""
    blocks_each = _LENGTH // _BLOCK_SIZE
    num_blocks = _NUM_SESSIONS * blocks_each
    tables = torch.randperm(num_blocks, device="cuda").view(_NUM_SESSIONS, blocks_each).int()
    shape = (num_blocks, _NUM_KV_HEADS, _BLOCK_SIZE, _DIM)
    keys, values = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    total = _NUM_SESSIONS * num_rows
    query = torch.randn(total, _NUM_HEADS, _DIM, device="cuda", dtype=torch.bfloat16)

    def filled(size: int, value: int) -> torch.Tensor:
        return torch.full((size,), value, dtype=torch.int32, device="cuda")

    tables_of_call = BatchTables(
        block_tables=tables,
        context_lens=filled(_NUM_SESSIONS, _LENGTH - num_rows),
        query_starts=torch.arange(0, total + 1, num_rows, dtype=torch.int32, device="cuda"),
        tree_starts=filled(_NUM_SESSIONS, num_rows),
        parents=filled(total, 0),
    )
    call = functools.partial(paged_attention, query, keys, values, tables_of_call, Scoring(_DIM**-0.5))
    return call, keys.nbytes + values.nbytes


def _measure(run: Run) -> Iterable[Finding]:
    for num_rows in (1, 8):
        call, num_bytes = attention_call(num_rows)
        taken = graph_us([call], 10 if run.quick else 20)
        floor = num_bytes / copy_bandwidth() * 1e6
        measured = f"{taken:.0f} us, {taken / floor:.2f} x the floor of {floor:.0f} us"
        target = f"<= {MOST_TIMES_FLOOR} x its KV bytes' time"
        name = f"32 sessions x 4k, {num_rows} row{'s' if num_rows > 1 else ''} each"
        yield judged(name, target, measured, taken <= MOST_TIMES_FLOOR * floor, us=taken, floor_us=floor)


PARTS = [Part("attention", "paged attention", 15.0, _measure)]
