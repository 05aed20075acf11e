"""The call record of CPU attention: numbers and addresses."""

from __future__ import annotations

from typing import NamedTuple, get_type_hints

import numpy as np


class CallFields(NamedTuple):
    """Addresses and strides in bytes; tensors as in `reference`."""

    query: int
    query_row_stride: int
    query_head_stride: int
    query_is_bf16: int  # the output too
    out: int  # [T, Hq, Dv], contiguous
    key_cache: int
    key_block_stride: int
    key_head_stride: int
    key_slot_stride: int
    value_cache: int
    value_block_stride: int
    value_head_stride: int
    value_slot_stride: int
    cache_kind: int  # of kv_codes.cpu.KINDS
    is_dotted: int  # 1: bf16 queries and caches, multiplied in pairs of bf16 (cpu_dots)
    key_scales_at: int  # from a head's codes to their scales, fp32 [block_size]; 0: the cache is not coded
    value_scales_at: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    group: int  # query heads per key/value head
    head_dim: int
    value_dim: int
    block_tables: int
    block_table_stride: int
    context_lens: int
    query_starts: int
    tree_starts: int
    parents: int
    item_starts: int  # int64 [S+1]: ranges of the sessions' work items
    rows_per_item: int
    num_parts: int  # units that an item's splits may be divided among
    joins: int  # 1: folds the splits that a call before has left in parts
    parts: int  # states [items, max_splits, part_rows]; 0: num_parts is 1
    max_splits: int
    part_rows: int
    window_reach: int  # with window_step: as in arguments.Scoring.window
    window_step: int
    sinks: int  # fp32 [Hq]; 0: none
    error: int  # address of an int64
    scratch: int  # scratch memory of the first thread
    scratch_stride: int  # bytes to the next thread's
    # Byte offsets in a thread's scratch memory, fp32 unless noted; its queries are at 0. If dotted, queries, keys,
    # values and weights are bf16, keys and values in pairs: [head_dim / 2, TILE, 2], [TILE / 2, value_dim padded, 2].
    at_keys: int  # [head_dim, TILE]
    at_values: int  # [TILE, value_dim padded]
    at_scores: int  # [rows, TILE]: scores, then weights
    at_states: int  # [rows] states (cpu_splits): of the split that is being computed
    at_totals: int  # [rows] states: of the splits before it
    at_ranges: int  # int64 [rows, 2]: half-open range of logical positions
    at_slots: int  # int64 [4, TILE]: addresses of the tile's keys and values; if they are codes, of their scales
    at_key_scales: int  # [TILE]; used if the cache is coded
    at_value_scales: int  # [TILE]
    scaling: float
    softcap: float  # 0: none


_DTYPES = {int: np.int64, float: np.float64}
Call = np.dtype([(name, _DTYPES[kind]) for name, kind in get_type_hints(CallFields).items()])

# Values of the error counter.
ERROR_BLOCK, ERROR_PARENT = 1, 2
ERRORS = {
    ERROR_BLOCK: "block_tables names a block outside the cache",
    ERROR_PARENT: "the parent of a tree row is not an earlier row",
}
