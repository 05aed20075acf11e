"""Attention of an item's rows over one tile of keys and values, compiled.

Row invariance rests on three rules. A row's key/value loop runs over tiles of TILE logical positions that start at
multiples of TILE, whatever the query tile. All arithmetic is `simd`, `panel` and `cpu_dots`: each element is a fixed
chain of operations. No element outside a row's visible range takes part, not even with weight zero. Rows share only the
loading of a tile.

Of 8-bit codes (kernels/kv_codes) a tile holds the codes themselves, widened exactly. A key's scale multiplies its
score, before the softcap; a value's scale multiplies its weight, after the weight was added to the norm. Either is one
rounding, of one row's element by a number of that key or value, so the three rules hold here too.

Strides are in bytes. Packed row r is query row row_begin + r // group, query head kv_head * group + r % group.
"""

from __future__ import annotations

from numba import njit

from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES
from outrider.kernels.cpu.panel import make_panel, make_row_sums
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
    vround_bf16,
    vsplat,
    vstore,
    vsub,
    vtanh,
)
from outrider.kernels.paged_attention.cpu_dots import ROW_BLOCK, add_value_pairs, score_pairs, vstore_upper
from outrider.kernels.paged_attention.cpu_loading import TILE, TILE_BYTES, _padded_bytes
from outrider.kernels.paged_attention.cpu_splits import state_bytes

_add_scores = make_panel(ROW_BLOCK, TILE // LANES, accumulate=False)
_add_weighted, _add_listed = make_row_sums(ROW_BLOCK), make_row_sums(ROW_BLOCK, is_listed=True)


@njit
def _final_scores(call, scratch, scores, lane, first, last):  # type: ignore[no-untyped-def]
    """16 of a row's scores as the softmax takes them: scaled, capped, -inf outside places [first, last)."""
    part = vload(scores + 4 * lane)
    if call.is_dotted:
        part = vmul(part, vsplat(call.scaling))
    if call.key_scales_at > 0:  # those of places that the row does not see are arbitrary
        part = vmul(part, vload(scratch + call.at_key_scales + 4 * lane))
    if call.softcap > 0.0:
        cap = vsplat(call.softcap)
        part = vmul(vtanh(vdiv(part, cap)), cap)
    if first > 0 or last < TILE:
        part = vkeep(part, first - lane, last - lane)
    return part


@njit
def _softmax_row(call, scratch, row, first, last):  # type: ignore[no-untyped-def]
    """Online softmax step: scores of places [first, last) to weights; update the row's maximum, norm and sums."""
    scores = scratch + call.at_scores + row * TILE_BYTES
    sums = scratch + call.at_states + row * state_bytes(call.value_dim)
    norms = sums + _padded_bytes(call.value_dim)
    maximum = load_f32(norms + VECTOR_BYTES)
    a = _final_scores(call, scratch, scores, 0, first, last)
    b = _final_scores(call, scratch, scores, LANES, first, last)
    c = _final_scores(call, scratch, scores, 2 * LANES, first, last)
    d = _final_scores(call, scratch, scores, 3 * LANES, first, last)
    tile_maximum = hmax(vmax(vmax(a, b), vmax(c, d)))
    norm = vload(norms)
    if tile_maximum > maximum:
        shrink = vexp(vsplat(maximum - tile_maximum))
        norm = vmul(norm, shrink)
        for column in range(0, _padded_bytes(call.value_dim), VECTOR_BYTES):
            vstore(sums + column, vmul(vload(sums + column), shrink))
        maximum = tile_maximum
        store_f32(norms + VECTOR_BYTES, maximum)
    top = vsplat(maximum)
    a, b, c, d = vexp(vsub(a, top)), vexp(vsub(b, top)), vexp(vsub(c, top)), vexp(vsub(d, top))
    if call.is_dotted:
        a, b, c, d = vround_bf16(a), vround_bf16(b), vround_bf16(c), vround_bf16(d)
        vstore_upper(scores, a)
        vstore_upper(scores + 2 * LANES, b)
        vstore_upper(scores + 4 * LANES, c)
        vstore_upper(scores + 6 * LANES, d)
    else:
        vstore(scores, a)
        vstore(scores + VECTOR_BYTES, b)
        vstore(scores + 2 * VECTOR_BYTES, c)
        vstore(scores + 3 * VECTOR_BYTES, d)
    vstore(norms, vadd(vadd(vadd(vadd(norm, a), b), c), d))
    if call.value_scales_at > 0:
        scales = scratch + call.at_value_scales
        for lane in range(0, TILE_BYTES, VECTOR_BYTES):
            vstore(scores + lane, vmul(vload(scores + lane), vload(scales + lane)))


@njit
def _score(call, scratch, row, num_rows):  # type: ignore[no-untyped-def]
    """scores[row:] = queries[row:] @ keys, for 1 to ROW_BLOCK rows."""
    stride = 4 * call.head_dim
    queries, keys = scratch + row * stride, scratch + call.at_keys
    scores = scratch + call.at_scores + row * TILE_BYTES
    if call.is_dotted:
        score_pairs(num_rows, queries, stride, keys, TILE_BYTES, scores, TILE_BYTES, 0, call.head_dim // 2)
    else:
        _add_scores(num_rows, queries, stride, keys, TILE_BYTES, scores, TILE_BYTES, 0, call.head_dim)


@njit
def _add_values(call, scratch, row, num_rows, first, last, in_place):  # type: ignore[no-untyped-def]
    """sums[row:] += weights[row:, first:last] @ values[first:last], for 1 to ROW_BLOCK rows.

    in_place: as `_load_tile` was told. If dotted, more than one row only from an even place to an even one.
    """
    if first >= last:
        return
    stride = _padded_bytes(call.value_dim)
    weights = scratch + call.at_scores + row * TILE_BYTES
    values = scratch + call.at_values
    size = state_bytes(call.value_dim)
    sums = scratch + call.at_states + row * size
    if call.is_dotted:
        add_value_pairs(num_rows, weights, values, stride, sums, size, first, last)
        return
    if in_place:
        _add_listed(num_rows, weights, TILE_BYTES, values, stride, sums, size, first, last)
    else:
        _add_weighted(num_rows, weights, TILE_BYTES, values, stride, sums, size, first, last)


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
def _attend_tile(call, scratch, row_begin, row_end, tile_begin, in_place):  # type: ignore[no-untyped-def]
    """Attention of packed rows [row_begin, row_end) over the loaded tile; in_place: as `_load_tile` was told."""
    row = row_begin
    while row < row_end:
        num_rows = min(ROW_BLOCK, row_end - row)
        _score(call, scratch, row, num_rows)
        common_first, common_last = 0, TILE
        for r in range(row, row + num_rows):
            first, last = _range_in_tile(call, scratch, r, tile_begin)
            if first < last:
                _softmax_row(call, scratch, r, first, last)
            common_first, common_last = max(common_first, first), min(common_last, last)
        if call.is_dotted:
            common_first, common_last = common_first + common_first % 2, common_last - common_last % 2
        if common_first >= common_last:
            for r in range(row, row + num_rows):
                first, last = _range_in_tile(call, scratch, r, tile_begin)
                _add_values(call, scratch, r, 1, first, last, in_place)
        else:
            # The common range goes through the block panel, the rest before and after it row by row: each row still
            # adds exactly its visible values, in ascending order.
            for r in range(row, row + num_rows):
                first, _last = _range_in_tile(call, scratch, r, tile_begin)
                _add_values(call, scratch, r, 1, first, common_first, in_place)
            _add_values(call, scratch, row, num_rows, common_first, common_last, in_place)
            for r in range(row, row + num_rows):
                _first, last = _range_in_tile(call, scratch, r, tile_begin)
                _add_values(call, scratch, r, 1, common_last, last, in_place)
        row += num_rows
