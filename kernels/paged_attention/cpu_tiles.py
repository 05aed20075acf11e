"""Attention of an item's rows over one tile of keys and values, compiled.

Row invariance rests on three rules. A row's key/value loop runs over tiles of TILE logical positions that start at
multiples of TILE, whatever the query tile. All arithmetic is `simd` and `panel`: each element is a fixed chain of IEEE
operations. No element outside a row's visible range takes part, not even with weight zero. Rows share only the loading
of a tile.

Of 8-bit codes (kernels/kv_codes) a tile holds the codes themselves, widened exactly. A key's scale multiplies its
score, before the softcap; a value's scale multiplies its weight, after the weight was added to the norm. Either is one
rounding, of one row's element by a number of that key or value, so the three rules hold here too.

Strides are in bytes. Packed row r is query row row_begin + r // group, query head kv_head * group + r % group.
"""

from __future__ import annotations

from numba import njit

from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES
from outrider.kernels.cpu.panel import make_panel
from outrider.kernels.cpu.simd import (
    hmax,
    load_f32,
    load_i64,
    store_f32,
    vadd,
    vdiv,
    vexp,
    vkeep,
    vload,
    vmax,
    vmul,
    vsplat,
    vstore,
    vsub,
    vtanh,
)
from outrider.kernels.paged_attention.cpu_loading import TILE, TILE_BYTES, _padded_bytes

ROW_BLOCK = 4  # packed rows of a panel
NO_SCORE = -1e30  # initial maximum; finite, so that differences are not NaN

_scores_block = make_panel(ROW_BLOCK, TILE // LANES, accumulate=False)
_scores_row = make_panel(1, TILE // LANES, accumulate=False)
_sums_block_wide = make_panel(ROW_BLOCK, 4, accumulate=True)
_sums_block = make_panel(ROW_BLOCK, 1, accumulate=True)
_sums_row_wide = make_panel(1, 4, accumulate=True)
_sums_row = make_panel(1, 1, accumulate=True)


@njit
def _multiply(scores, scales):  # type: ignore[no-untyped-def]
    """One row's scores or weights times the tile's scales. Those of places that the row does not see are arbitrary."""
    for lane in range(0, TILE_BYTES, VECTOR_BYTES):
        vstore(scores + lane, vmul(vload(scores + lane), vload(scales + lane)))


@njit
def _softmax_row(call, scratch, row, first, last):  # type: ignore[no-untyped-def]
    """Online softmax step: scores of places [first, last) to weights; update the row's maximum, norm and sums."""
    scores = scratch + call.at_scores + row * TILE_BYTES
    maximum = load_f32(scratch + call.at_maxima + 4 * row)
    if call.key_scales_at > 0:
        _multiply(scores, scratch + call.at_key_scales)
    if call.softcap > 0.0 or first > 0 or last < TILE:
        for lane in range(0, TILE, LANES):
            part = vload(scores + 4 * lane)
            if call.softcap > 0.0:
                cap = vsplat(call.softcap)
                part = vmul(vtanh(vdiv(part, cap)), cap)
            vstore(scores + 4 * lane, vkeep(part, first - lane, last - lane))
    a, b = vload(scores), vload(scores + VECTOR_BYTES)
    c, d = vload(scores + 2 * VECTOR_BYTES), vload(scores + 3 * VECTOR_BYTES)
    tile_maximum = hmax(vmax(vmax(a, b), vmax(c, d)))
    norms = scratch + call.at_norms + row * VECTOR_BYTES
    norm = vload(norms)
    if tile_maximum > maximum:
        shrink = vexp(vsplat(maximum - tile_maximum))
        norm = vmul(norm, shrink)
        stride = _padded_bytes(call.value_dim)
        sums = scratch + call.at_sums + row * stride
        for column in range(0, stride, VECTOR_BYTES):
            vstore(sums + column, vmul(vload(sums + column), shrink))
        maximum = tile_maximum
        store_f32(scratch + call.at_maxima + 4 * row, maximum)
    top = vsplat(maximum)
    a, b, c, d = vexp(vsub(a, top)), vexp(vsub(b, top)), vexp(vsub(c, top)), vexp(vsub(d, top))
    vstore(scores, a)
    vstore(scores + VECTOR_BYTES, b)
    vstore(scores + 2 * VECTOR_BYTES, c)
    vstore(scores + 3 * VECTOR_BYTES, d)
    vstore(norms, vadd(vadd(vadd(vadd(norm, a), b), c), d))
    if call.value_scales_at > 0:
        _multiply(scores, scratch + call.at_value_scales)


@njit
def _add_values(call, scratch, row, is_block, first, last):  # type: ignore[no-untyped-def]
    """sums[row] += weights[row, first:last] @ values[first:last], for one row or ROW_BLOCK rows."""
    if first >= last:
        return
    stride = _padded_bytes(call.value_dim)
    weights = scratch + call.at_scores + row * TILE_BYTES
    values = scratch + call.at_values
    sums = scratch + call.at_sums + row * stride
    column = 0
    while column + 4 * VECTOR_BYTES <= stride:
        if is_block:
            _sums_block_wide(weights, TILE_BYTES, values + column, stride, sums + column, stride, first, last)
        else:
            _sums_row_wide(weights, TILE_BYTES, values + column, stride, sums + column, stride, first, last)
        column += 4 * VECTOR_BYTES
    while column < stride:
        if is_block:
            _sums_block(weights, TILE_BYTES, values + column, stride, sums + column, stride, first, last)
        else:
            _sums_row(weights, TILE_BYTES, values + column, stride, sums + column, stride, first, last)
        column += VECTOR_BYTES


@njit
def _range_in_tile(call, scratch, row, tile_begin):  # type: ignore[no-untyped-def]
    """Half-open range of the tile's places that a packed row sees; (0, 0) if none."""
    ranges = scratch + call.at_ranges + 16 * row
    first = max(load_i64(ranges) - tile_begin, 0)
    last = min(load_i64(ranges + 8) - tile_begin, TILE)
    if first >= last:
        return 0, 0
    return first, last


@njit
def _attend_tile(call, scratch, row_begin, row_end, tile_begin):  # type: ignore[no-untyped-def]
    """Attention of packed rows [row_begin, row_end) over the loaded tile."""
    query_stride = 4 * call.head_dim
    row = row_begin
    while row < row_end:
        query = scratch + row * query_stride
        scores = scratch + call.at_scores + row * TILE_BYTES
        keys = scratch + call.at_keys
        height = ROW_BLOCK if row + ROW_BLOCK <= row_end else 1
        if height == 1:
            _scores_row(query, query_stride, keys, TILE_BYTES, scores, TILE_BYTES, 0, call.head_dim)
        else:
            _scores_block(query, query_stride, keys, TILE_BYTES, scores, TILE_BYTES, 0, call.head_dim)
        common_first, common_last = 0, TILE
        for r in range(row, row + height):
            first, last = _range_in_tile(call, scratch, r, tile_begin)
            if first < last:
                _softmax_row(call, scratch, r, first, last)
            common_first, common_last = max(common_first, first), min(common_last, last)
        if height == 1 or common_first >= common_last:
            for r in range(row, row + height):
                first, last = _range_in_tile(call, scratch, r, tile_begin)
                _add_values(call, scratch, r, False, first, last)
        else:
            # The common range goes through the block panel, the rest before and after it row by row: each row still
            # adds exactly its visible values, in ascending order.
            for r in range(row, row + height):
                first, _last = _range_in_tile(call, scratch, r, tile_begin)
                _add_values(call, scratch, r, False, first, common_first)
            _add_values(call, scratch, row, True, common_first, common_last)
            for r in range(row, row + height):
                _first, last = _range_in_tile(call, scratch, r, tile_begin)
                _add_values(call, scratch, r, False, common_last, last)
        row += height
