"""First and main kernel of GPU attention: tiles of rows over splits of the cache.

A program takes a tile (up to ROWS rows of one session x the GROUP query heads of one KV head) and iterates over splits
of SPLIT positions, and in each over blocks of BLOCK_N positions in ascending order. Both are cut by logical position
from 0, so a row meets the same blocks in any tile. A block that a row does not see leaves its state bitwise unchanged.

Chain rows share each loaded block; tree rows do so up to the block in which the tree begins. From there on each tree
row gets its own blocks, with its ancestors gathered in logical order: it computes what the same tokens compute as a
chain. (A mask in cache order would put the ancestors into other blocks and change the bits.)
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.kv_codes.triton import widen
from outrider.kernels.paged_attention.triton_softmax import (
    _attend_block,
    _bound,
    _count_starts,
    _finish,
    _first_seen,
    _fold,
)
from outrider.kernels.triton_numbers import round_to

# Kinds of codes in a cache; 0: it has no codes.
INT8, E4M3 = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _load_block(  # type: ignore[no-untyped-def]
    cache, index, is_loaded, table, block_stride, slot_stride,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, COMPUTE: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Rows of one head at cache indices index [N], as [N, PADDED_DIM]; zero where is_loaded is false. Of codes, the
    codes themselves: bf16 holds each exactly."""
    block_ids = tl.load(table + index // BLOCK_SIZE, mask=is_loaded, other=0).to(tl.int64)
    dim = tl.arange(0, PADDED_DIM)
    pointers = cache + (block_ids * block_stride + (index % BLOCK_SIZE) * slot_stride)[:, None] + dim[None, :]
    if CODES:
        codes = tl.load(pointers, mask=is_loaded[:, None] & (dim < DIM)[None, :], other=0)
        return widen(codes, CODES == E4M3).to(COMPUTE)
    elif DIM == PADDED_DIM:
        return tl.load(pointers, mask=is_loaded[:, None], other=0.0).to(COMPUTE)
    else:
        return tl.load(pointers, mask=is_loaded[:, None] & (dim < DIM)[None, :], other=0.0).to(COMPUTE)


@triton.jit
def _load_keys_and_values(  # type: ignore[no-untyped-def]
    key_cache, value_cache, index, is_loaded, table, key_block_stride, key_slot_stride, value_block_stride,
    value_slot_stride, BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST_DIM: tl.constexpr, PADDED_REST_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, COMPUTE: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Keys, values, and the elements of the keys from DIM on. With such a rest the values are the keys before it."""
    key = _load_block(
        key_cache, index, is_loaded, table, key_block_stride, key_slot_stride, BLOCK_SIZE, DIM, PADDED_DIM, COMPUTE,
        CODES,
    )  # fmt: skip
    if REST_DIM > 0:
        rest = _load_block(
            key_cache + DIM, index, is_loaded, table, key_block_stride, key_slot_stride,
            BLOCK_SIZE, REST_DIM, PADDED_REST_DIM, COMPUTE, CODES,
        )  # fmt: skip
        return key, key, rest
    else:
        value = _load_block(
            value_cache, index, is_loaded, table, value_block_stride, value_slot_stride,
            BLOCK_SIZE, VALUE_DIM, PADDED_VALUE_DIM, COMPUTE, CODES,
        )  # fmt: skip
        return key, value, key


@triton.jit
def _load_scales(  # type: ignore[no-untyped-def]
    scales, index, is_loaded, table, block_stride,
    BLOCK_SIZE: tl.constexpr, CODES: tl.constexpr,
):  # fmt: skip
    """Scales [N] of one head's rows at cache indices index [N]; block_stride in codes, of 1 byte. Unused: zeros."""
    if CODES:
        block_ids = tl.load(table + index // BLOCK_SIZE, mask=is_loaded, other=0).to(tl.int64)
        return tl.load(scales + block_ids * (block_stride // 4) + index % BLOCK_SIZE, mask=is_loaded, other=0.0)
    else:
        return tl.zeros(index.shape, tl.float32)


@triton.jit
def _tree_depths(row, is_row, tree_start, parents):  # type: ignore[no-untyped-def]
    """Number of ancestors in the tree of each row [M]; -1 for rows before it. min(parent, node - 1) ends any walk."""
    node = tl.where(is_row, row, -1)
    depth = tl.full(row.shape, -1, tl.int32)
    while tl.max(node, 0) >= tree_start:
        is_inside = node >= tree_start
        depth += is_inside.to(tl.int32)
        parent = tl.load(parents + node, mask=is_inside, other=-1)
        node = tl.where(is_inside, tl.minimum(parent, node - 1), node)
    return depth


@triton.jit
def _tree_indices(position, row, last, context, tree_start, parents):  # type: ignore[no-untyped-def]
    """Cache indices of logical positions [N], as seen by a tree row at logical position `last`."""
    index = position
    node = row
    place = last
    while node >= tree_start:
        index = tl.where(position == place, context + node, index)
        node = tl.minimum(tl.load(parents + node), node - 1)
        place -= 1
    return index


# Not specialised: these change from batch to batch and must not trigger compilation.
@triton.jit(do_not_specialize=["num_sessions", "num_splits", "table_stride"])
def attend_splits(  # type: ignore[no-untyped-def]
    query, key_cache, value_cache, key_scales, value_scales, out, part_sums, part_states, sinks,
    block_tables, context_lens, query_starts, tree_starts, parents,
    num_sessions, num_splits, num_heads, table_stride, query_row_stride, query_head_stride,
    key_block_stride, key_head_stride, key_slot_stride, value_block_stride, value_head_stride, value_slot_stride,
    window_reach, window_step, score_scale, score_cap,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    REST_DIM: tl.constexpr, PADDED_REST_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, PADDED_VALUE_DIM: tl.constexpr, COMPUTE: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, IS_FUSED: tl.constexpr,
    CODES: tl.constexpr,
):  # fmt: skip
    """Grid (T // ROWS + S tiles, Hkv, programs per tile).

    REST_DIM > 0: latent attention. Keys have REST_DIM more elements behind the first DIM, which are the values.
    IS_FUSED: one program folds all splits of its tile and writes the output. Otherwise each split's state goes to
    part_sums [T, Hq, num_splits, Dv] and part_states [T, Hq, num_splits, 2], for `triton_combine`.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    # The first tile of session s is query_starts[s] // ROWS + s: room for all its rows, ascending in s.
    session = _count_starts(query_starts, num_sessions, tile, ROWS, 1) - 1
    start = tl.load(query_starts + session)
    num_rows = tl.load(query_starts + session + 1) - start
    first_row = (tile - start // ROWS - session) * ROWS
    if first_row >= num_rows:
        return
    context = tl.load(context_lens + session)
    tree_start = tl.minimum(tl.load(tree_starts + session), num_rows)
    end_row = tl.minimum(first_row + ROWS, num_rows)
    table = block_tables + session.to(tl.int64) * table_stride
    parents += start
    key_cache += kv_head.to(tl.int64) * key_head_stride
    value_cache += kv_head.to(tl.int64) * value_head_stride
    if CODES:
        key_scales += kv_head.to(tl.int64) * (key_head_stride // 4)
        value_scales += kv_head.to(tl.int64) * (value_head_stride // 4)

    packed = tl.arange(0, BLOCK_M)
    row = first_row + packed // GROUP
    head = kv_head * GROUP + packed % GROUP
    is_row = (packed < ROWS * GROUP) & (row < num_rows)
    query_dim = tl.arange(0, PADDED_DIM)
    query_offsets = (start + row).to(tl.int64) * query_row_stride + head.to(tl.int64) * query_head_stride
    rows = tl.load(
        query + query_offsets[:, None] + query_dim[None, :],
        mask=is_row[:, None] & (query_dim < DIM)[None, :],
        other=0.0,
    ).to(COMPUTE)
    rest_rows = rows
    if REST_DIM > 0:
        rest_dim = tl.arange(0, PADDED_REST_DIM)
        rest_rows = tl.load(
            query + query_offsets[:, None] + DIM + rest_dim[None, :],
            mask=is_row[:, None] & (rest_dim < REST_DIM)[None, :],
            other=0.0,
        ).to(COMPUTE)

    # Visible ranges of logical positions (half-open) within the shared blocks.
    tree_base = context + tree_start
    shared_end = tree_base // BLOCK_N * BLOCK_N
    depth = _tree_depths(row, is_row, tree_start, parents)
    seen_end = tl.where(is_row, tl.where(row >= tree_start, shared_end, context + row + 1), 0)
    seen_begin = tl.zeros_like(row)
    lowest = 0
    if HAS_WINDOW:
        logical = tl.where(row >= tree_start, tree_base + depth, context + row)
        seen_begin = _first_seen(logical, window_reach, window_step)
        # The bound that `triton_combine` uses, which does not know depths.
        lowest = _first_seen(context + tl.minimum(first_row, tree_start), window_reach, window_step)
    tile_begin = tl.min(tl.where(is_row, seen_begin, 2147483647), 0)
    tile_end = tl.max(seen_end, 0)

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    norm = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, PADDED_VALUE_DIM], tl.float32)
    value_dim = tl.arange(0, PADDED_VALUE_DIM)
    out_rows = (start + row).to(tl.int64) * num_heads + head
    is_out = is_row[:, None] & (value_dim < VALUE_DIM)[None, :]
    first_split = lowest // SPLIT + tl.program_id(2)
    end_split = (context + end_row - 1) // SPLIT + 1
    for split in range(_bound(first_split), _bound(end_split), _bound(tl.num_programs(2))):
        part_maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        part_norm = tl.zeros([BLOCK_M], tl.float32)
        part = tl.zeros([BLOCK_M, PADDED_VALUE_DIM], tl.float32)
        begin, end = split * SPLIT, split * SPLIT + SPLIT
        first_block = tl.maximum(begin, tile_begin // BLOCK_N * BLOCK_N)
        for block in range(_bound(first_block), _bound(tl.minimum(end, tile_end)), BLOCK_N):
            position = block + tl.arange(0, BLOCK_N)
            is_loaded = (position >= tile_begin) & (position < tile_end)
            visible = (position[None, :] >= seen_begin[:, None]) & (position[None, :] < seen_end[:, None])
            key, value, rest = _load_keys_and_values(
                key_cache, value_cache, position, is_loaded, table, key_block_stride, key_slot_stride,
                value_block_stride, value_slot_stride,
                BLOCK_SIZE, DIM, PADDED_DIM, REST_DIM, PADDED_REST_DIM, VALUE_DIM, PADDED_VALUE_DIM, COMPUTE, CODES,
            )  # fmt: skip
            key_scale = _load_scales(key_scales, position, is_loaded, table, key_block_stride, BLOCK_SIZE, CODES)
            value_scale = _load_scales(value_scales, position, is_loaded, table, value_block_stride, BLOCK_SIZE, CODES)
            part_maximum, part_norm, part = _attend_block(
                part_maximum, part_norm, part, rows, key, value, key_scale, value_scale, rest_rows, rest, visible,
                score_scale, score_cap, HAS_SOFTCAP, REST_DIM > 0, CODES,
            )  # fmt: skip
        for tree_row in range(_bound(tl.maximum(first_row, tree_start)), _bound(end_row)):
            is_own = is_row & (row == tree_row)
            last = tree_base + tl.max(tl.where(is_own, depth, 0), 0)
            own_begin = 0
            if HAS_WINDOW:
                own_begin = _first_seen(last, window_reach, window_step)
            first_own = tl.maximum(begin, tl.maximum(shared_end, own_begin // BLOCK_N * BLOCK_N))
            for block in tl.range(_bound(first_own), _bound(tl.minimum(end, last + 1)), BLOCK_N, num_stages=1):
                position = block + tl.arange(0, BLOCK_N)
                is_seen = (position >= own_begin) & (position <= last)
                index = _tree_indices(position, tree_row, last, context, tree_start, parents)
                key, value, rest = _load_keys_and_values(
                    key_cache, value_cache, index, is_seen, table, key_block_stride, key_slot_stride,
                    value_block_stride, value_slot_stride,
                    BLOCK_SIZE, DIM, PADDED_DIM, REST_DIM, PADDED_REST_DIM, VALUE_DIM, PADDED_VALUE_DIM, COMPUTE, CODES,
                )  # fmt: skip
                key_scale = _load_scales(key_scales, index, is_seen, table, key_block_stride, BLOCK_SIZE, CODES)
                value_scale = _load_scales(value_scales, index, is_seen, table, value_block_stride, BLOCK_SIZE, CODES)
                part_maximum, part_norm, part = _attend_block(
                    part_maximum, part_norm, part, rows, key, value, key_scale, value_scale, rest_rows, rest,
                    is_own[:, None] & is_seen[None, :], score_scale, score_cap, HAS_SOFTCAP, REST_DIM > 0, CODES,
                )  # fmt: skip
        if IS_FUSED:
            maximum, norm, sums = _fold(maximum, norm, sums, part_maximum, part_norm, part)
        else:
            places = out_rows * num_splits + split
            tl.store(part_sums + places[:, None] * VALUE_DIM + value_dim[None, :], part, mask=is_out)
            tl.store(part_states + places * 2, part_maximum, mask=is_row)
            tl.store(part_states + places * 2 + 1, part_norm, mask=is_row)
    if IS_FUSED:
        result = _finish(maximum, norm, sums, sinks, head, is_row, HAS_SINKS)
        tl.store(
            out + out_rows[:, None] * VALUE_DIM + value_dim[None, :],
            round_to(result, out.dtype.element_ty),
            mask=is_out,
        )
