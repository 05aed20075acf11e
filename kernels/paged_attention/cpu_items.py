"""Work items of CPU attention, compiled: the rows of a query tile with all query heads of one key/value head.

Selects the tiles that an item visits and their contents; `cpu_loading` loads them, `cpu_tiles` does the arithmetic.
Chain rows share each loaded tile; tree rows do so up to the tile in which the tree begins. From there on each tree row
gets its own tiles, with its ancestors gathered in logical order: it computes exactly what the same tokens compute as a
chain.

Where a call has few items, an item's splits (`cpu_splits`) are divided among several units, and a second call folds
them.
"""

from __future__ import annotations

from numba import carray, njit

from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES
from outrider.kernels.cpu.simd import (
    copy_bytes,
    hmax,
    hsum,
    load_f32,
    load_i32,
    load_i64,
    store_f32,
    store_i64,
    vdiv,
    vexp,
    vload,
    vmul,
    vsplat,
    vstore,
    vstore_bf16,
)
from outrider.kernels.paged_attention.cpu_call import ERROR_PARENT, Call
from outrider.kernels.paged_attention.cpu_loading import (
    TILE,
    _block_addresses,
    _fill_slot,
    _fill_slots,
    _load,
    _load_tile,
    _reads_in_place,
)
from outrider.kernels.paged_attention.cpu_splits import NO_SCORE, SPLIT, begin_split, clear_state, fold, state_bytes
from outrider.kernels.paged_attention.cpu_tiles import _attend_tile


@njit
def _load_queries(call, scratch, kv_head, row_begin, row_end):  # type: ignore[no-untyped-def]
    """Loads the queries of global rows [row_begin, row_end), scaled unless dotted."""
    element = 2 if call.query_is_bf16 else 4
    scale = vsplat(call.scaling)
    for packed in range((row_end - row_begin) * call.group):
        head = kv_head * call.group + packed % call.group
        source = call.query + (row_begin + packed // call.group) * call.query_row_stride
        source += head * call.query_head_stride
        target = scratch + packed * 4 * call.head_dim
        if call.is_dotted:
            copy_bytes(target, source, 2 * call.head_dim)
        for column in range(0, 0 if call.is_dotted else call.head_dim, LANES):
            d = min(column, call.head_dim - LANES)
            vstore(target + 4 * d, vmul(_load(source + d * element, call.query_is_bf16), scale))


@njit
def _init_states(call, scratch, kv_head, num_packed, split):  # type: ignore[no-untyped-def]
    """States of rows that have seen nothing of a split; -1: of their first one.

    A sink is an initial logit whose value vector is zero.
    """
    size = state_bytes(call.value_dim)
    for packed in range(num_packed):
        state = scratch + call.at_states + packed * size
        clear_state(state, call.value_dim)
        is_first = split < 0 or load_i64(scratch + call.at_ranges + 16 * packed) // SPLIT == split
        if call.sinks != 0 and is_first:
            sink = load_f32(call.sinks + 4 * (kv_head * call.group + packed % call.group))
            maximum = max(sink, NO_SCORE)
            store_f32(state + size - 2 * VECTOR_BYTES, hmax(vexp(vsplat(sink - maximum))))
            store_f32(state + size - VECTOR_BYTES, maximum)


@njit
def _store_rows(call, states, kv_head, row_begin, row_end):  # type: ignore[no-untyped-def]
    """Writes sums / norms to the output."""
    element = 2 if call.query_is_bf16 else 4
    size = state_bytes(call.value_dim)
    for packed in range((row_end - row_begin) * call.group):
        head = kv_head * call.group + packed % call.group
        row = row_begin + packed // call.group
        target = call.out + (row * call.num_kv_heads * call.group + head) * call.value_dim * element
        sums = states + packed * size
        norm = vsplat(hsum(vload(sums + size - 2 * VECTOR_BYTES)))
        for column in range(0, call.value_dim, LANES):
            d = min(column, call.value_dim - LANES)
            mean = vdiv(vload(sums + 4 * d), norm)
            if call.query_is_bf16:
                vstore_bf16(target + 2 * d, mean)
            else:
                vstore(target + 4 * d, mean)


@njit
def _depth(call, parents, row, tree_start):  # type: ignore[no-untyped-def]
    """Number of ancestors in the tree of a tree row."""
    depth = 0
    node = load_i32(parents + 4 * row)
    below = row
    while node >= tree_start:
        if node >= below:
            store_i64(call.error, ERROR_PARENT)
            return 0
        depth += 1
        below, node = node, load_i32(parents + 4 * node)
    return depth


@njit
def _set_range(call, scratch, packed_begin, logical_position, end):  # type: ignore[no-untyped-def]
    """Set the visible range of one query row's packed rows: up to end, limited by the window; returns its start."""
    first = 0
    if call.window_reach > 0:
        first = max(logical_position + 1 - call.window_reach, 0) // call.window_step * call.window_step
    for packed in range(packed_begin, packed_begin + call.group):
        store_i64(scratch + call.at_ranges + 16 * packed, first)
        store_i64(scratch + call.at_ranges + 16 * packed + 8, end)
    return first


@njit
def _attend_tree_row(call, scratch, session, kv_head, row, packed, context_len):  # type: ignore[no-untyped-def]
    """The tiles of a tree row (relative index), from the one in which the tree begins."""
    parents = call.parents + 4 * load_i32(call.query_starts + 4 * session)
    tree_start = load_i32(call.tree_starts + 4 * session)
    tree_position = context_len + tree_start
    position = tree_position + _depth(call, parents, row, tree_start)
    in_place = _reads_in_place(call, call.group)
    first = _set_range(call, scratch, packed, position, position + 1)
    tile_begin = max(tree_position, first) // TILE * TILE
    while tile_begin <= position:
        tile_end = min(tile_begin + TILE, position + 1)
        _fill_slots(call, scratch, session, kv_head, tile_begin, min(tile_end, tree_position))
        node, at = row, position
        while at >= tree_position and at >= tile_begin:
            if at < tile_end:
                index = context_len + node
                key, value = _block_addresses(call, session, kv_head, index)
                _fill_slot(call, scratch, at - tile_begin, index, key, value)
            node, at = load_i32(parents + 4 * node), at - 1
        _load_tile(call, scratch, tile_end - tile_begin, in_place)
        if tile_begin % SPLIT == 0:
            begin_split(call, scratch, packed, packed + call.group, tile_begin)
        _attend_tile(call, scratch, packed, packed + call.group, tile_begin, in_place)
        tile_begin += TILE


@njit
def _set_ranges(call, scratch, session, row_begin, row_end):  # type: ignore[no-untyped-def]
    """Sets the ranges that relative rows see of what all share; returns the first tile's begin, and the end."""
    context_len = load_i32(call.context_lens + 4 * session)
    tree_start = load_i32(call.tree_starts + 4 * session)
    parents = call.parents + 4 * load_i32(call.query_starts + 4 * session)
    begin, shared_end = context_len + row_end, 0
    for row in range(row_begin, row_end):
        position, end = context_len + row, context_len + row + 1
        if row >= tree_start:
            position = context_len + tree_start + _depth(call, parents, row, tree_start)
            end = (context_len + tree_start) // TILE * TILE
        first = _set_range(call, scratch, (row - row_begin) * call.group, position, end)
        begin, shared_end = min(begin, first), max(shared_end, end)
    return begin // TILE * TILE, shared_end


@njit
def _attend_shared(call, scratch, session, kv_head, num_packed, tile_begin, end):  # type: ignore[no-untyped-def]
    """The tiles from tile_begin to end, for all packed rows."""
    begin, in_place = tile_begin, _reads_in_place(call, num_packed)
    tile_end = min(tile_begin + TILE, end)
    _fill_slots(call, scratch, session, kv_head, tile_begin, tile_end)
    while tile_begin < end:
        _load_tile(call, scratch, tile_end - tile_begin, in_place)
        next_end = min(tile_end + TILE, end)
        # Listing the next tile now prefetches it while this one is computed.
        _fill_slots(call, scratch, session, kv_head, tile_end, next_end)
        if tile_begin % SPLIT == 0 and tile_begin > begin:
            begin_split(call, scratch, 0, num_packed, tile_begin)
        _attend_tile(call, scratch, 0, num_packed, tile_begin, in_place)
        tile_begin, tile_end = tile_begin + TILE, next_end


@njit
def _attend_item(call, scratch, session, kv_head, row_begin, row_end, begin, shared_end):  # type: ignore[no-untyped-def]
    """Attention of relative rows [row_begin, row_end) of a session over one key/value head, split by split."""
    first_row = load_i32(call.query_starts + 4 * session)
    context_len = load_i32(call.context_lens + 4 * session)
    tree_start = load_i32(call.tree_starts + 4 * session)
    num_packed, size = (row_end - row_begin) * call.group, state_bytes(call.value_dim)
    _load_queries(call, scratch, kv_head, first_row + row_begin, first_row + row_end)
    _init_states(call, scratch, kv_head, num_packed, -1)
    has_one_split = _num_splits(begin, context_len + row_end) == 1
    for packed in range(0 if has_one_split else num_packed):
        clear_state(scratch + call.at_totals + packed * size, call.value_dim)
    _attend_shared(call, scratch, session, kv_head, num_packed, begin, shared_end)
    for row in range(max(row_begin, tree_start), row_end):
        packed = (row - row_begin) * call.group
        _attend_tree_row(call, scratch, session, kv_head, row, packed, context_len)
    states = scratch + call.at_states
    if not has_one_split:
        states = scratch + call.at_totals
        for packed in range(num_packed):
            fold(states + packed * size, scratch + call.at_states + packed * size, call.value_dim)
    _store_rows(call, states, kv_head, first_row + row_begin, first_row + row_end)


@njit
def _attend_part(call, scratch, session, kv_head, row_begin, row_end, begin, end, part, states):  # type: ignore[no-untyped-def]
    """A part's share of an item's splits; states: where those of the item are kept."""
    first_row = load_i32(call.query_starts + 4 * session)
    num_packed, size = (row_end - row_begin) * call.group, state_bytes(call.value_dim)
    _load_queries(call, scratch, kv_head, first_row + row_begin, first_row + row_end)
    first_split, num_splits = begin // SPLIT, _num_splits(begin, end)
    share = (num_splits + call.num_parts - 1) // call.num_parts
    for index in range(part * share, min((part + 1) * share, num_splits)):
        split = first_split + index
        _init_states(call, scratch, kv_head, num_packed, split)
        tile_begin, tile_end = max(begin, split * SPLIT), min(end, (split + 1) * SPLIT)
        _attend_shared(call, scratch, session, kv_head, num_packed, tile_begin, tile_end)
        copy_bytes(states + index * call.part_rows * size, scratch + call.at_states, num_packed * size)


@njit
def _join_parts(call, scratch, session, kv_head, row_begin, row_end, num_splits, states):  # type: ignore[no-untyped-def]
    """Folds an item's splits and writes its rows."""
    first_row = load_i32(call.query_starts + 4 * session)
    num_packed, size = (row_end - row_begin) * call.group, state_bytes(call.value_dim)
    for packed in range(num_packed):
        total = scratch + call.at_totals + packed * size
        clear_state(total, call.value_dim)
        for index in range(num_splits):
            fold(total, states + (index * call.part_rows + packed) * size, call.value_dim)
    _store_rows(call, scratch + call.at_totals, kv_head, first_row + row_begin, first_row + row_end)


@njit
def _num_splits(begin, end):  # type: ignore[no-untyped-def]
    return (end - 1) // SPLIT - begin // SPLIT + 1


@njit
def run_item(address, unit, thread):  # type: ignore[no-untyped-def]
    """Executes one unit: a part of an item, or joins an item's parts. address: of a `Call` record."""
    call = carray(address, 1, Call)[0]
    scratch = call.scratch + thread * call.scratch_stride
    item, part = unit // call.num_parts, unit % call.num_parts
    if call.joins:
        item, part = unit, 0
    session = 0
    while item >= load_i64(call.item_starts + 8 * (session + 1)):
        session += 1
    within = item - load_i64(call.item_starts + 8 * session)
    row_begin = within // call.num_kv_heads * call.rows_per_item
    start, stop = load_i32(call.query_starts + 4 * session), load_i32(call.query_starts + 4 * session + 4)
    row_end = min(row_begin + call.rows_per_item, stop - start)
    kv_head = within % call.num_kv_heads
    begin, end = _set_ranges(call, scratch, session, row_begin, row_end)
    num_splits = _num_splits(begin, end)
    # Tree rows have tiles of their own: their item stays whole.
    is_divided = call.num_parts > 1 and num_splits > 1 and load_i32(call.tree_starts + 4 * session) >= row_end
    states = call.parts + item * call.max_splits * call.part_rows * state_bytes(call.value_dim)
    if call.joins:
        if is_divided:
            _join_parts(call, scratch, session, kv_head, row_begin, row_end, num_splits, states)
    elif is_divided:
        _attend_part(call, scratch, session, kv_head, row_begin, row_end, begin, end, part, states)
    elif part == 0:
        _attend_item(call, scratch, session, kv_head, row_begin, row_end, begin, end)
