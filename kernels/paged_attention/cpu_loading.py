"""Loading a tile of keys and values for CPU attention, compiled: lists where they lie, prefetches, widens to fp32.

Exact: a loaded element is the stored one; of 8-bit codes, the code. Strides are in bytes.
"""

from __future__ import annotations

from numba import njit

from outrider.kernels.cpu.emitters import LANES, VECTOR_BYTES
from outrider.kernels.cpu.panel import (
    store_pairs,
    transposing_load_bf16,
    transposing_load_bf16_pairs,
    transposing_load_f32,
    transposing_load_words,
)
from outrider.kernels.cpu.simd import (
    copy_bytes,
    load_f32,
    load_i32,
    load_i64,
    prefetch_into_l2,
    store_f32,
    store_i64,
    vload,
    vload_bf16,
    vstore,
)
from outrider.kernels.kv_codes.cpu import (
    BFLOAT16,
    CODES_PER_WORD,
    FLOAT32,
    INT8,
    transposing_load_e4m3,
    transposing_load_e4m3_words,
    transposing_load_int8,
    transposing_load_int8_words,
    vload_e4m3,
    vload_int8,
)
from outrider.kernels.kv_codes.layout import SCALE_BYTES
from outrider.kernels.paged_attention.cpu_call import ERROR_BLOCK

TILE = 64  # logical positions
TILE_BYTES = 4 * TILE
# packed rows of an item that takes the values from the cache. Each block of four rows widens them anew there, but none
# are stored and loaded. A tile of SmolLM2's heads, AVX2: 9 rows 5.6 instead of 5.9 us, 15 too, from 18 on no gain.
_MOST_IN_PLACE = 16
_WORD_LANES = CODES_PER_WORD * LANES


@njit
def _padded_bytes(num_floats):  # type: ignore[no-untyped-def]
    return (num_floats + LANES - 1) // LANES * VECTOR_BYTES


@njit
def _load(address, is_bf16):  # type: ignore[no-untyped-def]
    return vload_bf16(address) if is_bf16 else vload(address)


@njit
def _element_bytes(cache_kind):  # type: ignore[no-untyped-def]
    if cache_kind == FLOAT32:
        return 4
    return 2 if cache_kind == BFLOAT16 else 1


@njit
def _load_scales(call, scratch, num_places):  # type: ignore[no-untyped-def]
    """The listed scales, side by side."""
    slots = scratch + call.at_slots + 16 * TILE
    keys, values = scratch + call.at_key_scales, scratch + call.at_value_scales
    for place in range(num_places):
        store_f32(keys + 4 * place, load_f32(load_i64(slots + 8 * place)))
        store_f32(values + 4 * place, load_f32(load_i64(slots + 8 * (TILE + place))))


@njit
def _load_codes(call, scratch, num_places):  # type: ignore[no-untyped-def]
    """Loads a tile of codes as floats; slots are listed up to the next multiple of LANES places."""
    is_int8, head_dim, value_dim = call.cache_kind == INT8, call.head_dim, call.value_dim
    slots, keys, values = scratch + call.at_slots, scratch + call.at_keys, scratch + call.at_values
    in_words = head_dim - head_dim % _WORD_LANES
    for place in range(0, num_places, LANES):
        for d in range(0, in_words, _WORD_LANES):
            target = keys + d * TILE_BYTES + 4 * place
            if is_int8:
                transposing_load_int8_words(slots + 8 * place, d, target, TILE_BYTES)
            else:
                transposing_load_e4m3_words(slots + 8 * place, d, target, TILE_BYTES)
        for column in range(in_words, head_dim, LANES):
            d = min(column, head_dim - LANES)
            target = keys + d * TILE_BYTES + 4 * place
            if is_int8:
                transposing_load_int8(slots + 8 * place, d, target, TILE_BYTES)
            else:
                transposing_load_e4m3(slots + 8 * place, d, target, TILE_BYTES)
    stride = _padded_bytes(value_dim)
    for place in range(num_places):
        source = load_i64(slots + 8 * (TILE + place))
        target = values + place * stride
        for column in range(0, value_dim, LANES):
            d = min(column, value_dim - LANES)
            vstore(target + 4 * d, vload_int8(source + d) if is_int8 else vload_e4m3(source + d))
    _load_scales(call, scratch, num_places)


@njit
def _block_addresses(call, session, kv_head, index):  # type: ignore[no-untyped-def]
    """Addresses of the key and the value at a cache index of a session."""
    table = call.block_tables + session * call.block_table_stride
    block = load_i32(table + index // call.block_size * 4)
    if block < 0 or block >= call.num_blocks:
        store_i64(call.error, ERROR_BLOCK)
        block = 0
    within = index % call.block_size
    key = call.key_cache + block * call.key_block_stride + kv_head * call.key_head_stride
    value = call.value_cache + block * call.value_block_stride + kv_head * call.value_head_stride
    return key + within * call.key_slot_stride, value + within * call.value_slot_stride


@njit
def _fill_slot(call, scratch, place, index, key, value):  # type: ignore[no-untyped-def]
    """List one key and value, those at a cache index, as part of the next tile."""
    slots = scratch + call.at_slots + 8 * place
    store_i64(slots, key)
    store_i64(slots + 8 * TILE, value)
    if call.key_scales_at > 0:
        within = index % call.block_size
        store_i64(slots + 16 * TILE, key + call.key_scales_at - within * (call.key_slot_stride - SCALE_BYTES))
        store_i64(slots + 24 * TILE, value + call.value_scales_at - within * (call.value_slot_stride - SCALE_BYTES))


@njit
def _fill_slots(call, scratch, session, kv_head, tile_begin, tile_end):  # type: ignore[no-untyped-def]
    """List the keys and values at cache indices [tile_begin, tile_end), and prefetch them."""
    # Read once: the compiler would reload the fields of `call` after each store.
    element, block_size, is_coded = _element_bytes(call.cache_kind), call.block_size, call.key_scales_at > 0
    key_bytes, value_bytes = call.head_dim * element, call.value_dim * element
    key_step, value_step, slots = call.key_slot_stride, call.value_slot_stride, scratch + call.at_slots
    index = tile_begin
    while index < tile_end:
        key, value = _block_addresses(call, session, kv_head, index)
        block_end = min(index - index % block_size + block_size, tile_end)
        while index < block_end:
            if is_coded:
                _fill_slot(call, scratch, index - tile_begin, index, key, value)
            else:
                store_i64(slots + 8 * (index - tile_begin), key)
                store_i64(slots + 8 * (TILE + index - tile_begin), value)
            # Blocks are scattered. 30 sessions of 2,048 tokens, 3 heads of 64 (47 MB), two threads of a Zen 3: 2.6 us a
            # tile at one row; with non-temporal hints, whose lines L1 drops, 3.8 to 4.0, without any 4.1 to 4.8. One
            # session of 1,000 tokens, in cache, 16 heads: 0.29 -> 0.31 ms.
            for line in range(0, key_bytes, 64):
                prefetch_into_l2(key + line)
            for line in range(0, value_bytes, 64):
                prefetch_into_l2(value + line)
            key, value, index = key + key_step, value + value_step, index + 1


@njit
def _load_pairs(call, scratch, num_places):  # type: ignore[no-untyped-def]
    """Loads a tile for `cpu_dots`; slots are listed up to the next multiple of LANES places."""
    head_dim, value_dim = call.head_dim, call.value_dim
    slots, keys, values = scratch + call.at_slots, scratch + call.at_keys, scratch + call.at_values
    for place in range(0, num_places, LANES):
        for column in range(0, head_dim, 2 * LANES):
            d = min(column, head_dim - 2 * LANES)  # the last vector may overlap the previous one
            transposing_load_words(slots + 8 * place, 2 * d, keys + d // 2 * TILE_BYTES + 4 * place, TILE_BYTES)
    stride = _padded_bytes(value_dim)
    if num_places % 2:  # its partner is masked: any readable address will do
        store_i64(slots + 8 * (TILE + num_places), load_i64(slots + 8 * TILE))
    for place in range(0, num_places, 2):
        first, second = load_i64(slots + 8 * (TILE + place)), load_i64(slots + 8 * (TILE + place + 1))
        target = values + place // 2 * stride
        for column in range(0, value_dim, LANES):
            d = min(column, value_dim - LANES)
            store_pairs(target + 4 * d, first + 2 * d, second + 2 * d)


@njit
def _reads_in_place(call, num_packed):  # type: ignore[no-untyped-def]
    """Returns whether an item with that many rows reads values from the cache, not from a tile that was widened."""
    is_plain = call.cache_kind == BFLOAT16 and not call.is_dotted and call.value_dim % LANES == 0
    return is_plain and num_packed <= _MOST_IN_PLACE


@njit
def _load_tile(call, scratch, num_places, in_place):  # type: ignore[no-untyped-def]
    """Load the listed keys, transposed to [head_dim, TILE], and values [TILE, value_dim], as fp32.

    in_place: instead of the values their addresses, as the list is about to be that of the next tile.
    """
    # Read once: the compiler would reload the fields of `call` after each store.
    is_bf16, head_dim, value_dim = call.cache_kind == BFLOAT16, call.head_dim, call.value_dim
    slots, keys, values = scratch + call.at_slots, scratch + call.at_keys, scratch + call.at_values
    # Padding is loaded and masked: any readable address will do.
    for place in range(num_places, (num_places + LANES - 1) // LANES * LANES):
        store_i64(slots + 8 * place, load_i64(slots))
    if call.is_dotted:
        _load_pairs(call, scratch, num_places)
        return
    if call.key_scales_at > 0:
        _load_codes(call, scratch, num_places)
        return
    paired = 0
    if is_bf16:
        # Half the shuffles: 12 layers of 16 sessions x 8 rows x 1,000 tokens x 16 heads of 64, 2 threads: 103 -> 95 ms.
        paired = head_dim - head_dim % (2 * LANES)
    for place in range(0, num_places, LANES):
        for d in range(0, paired, 2 * LANES):
            transposing_load_bf16_pairs(slots + 8 * place, 2 * d, keys + d * TILE_BYTES + 4 * place, TILE_BYTES)
        for column in range(paired, head_dim, LANES):
            # If the head size is no multiple of 16, the last vector overlaps the previous one.
            d = min(column, head_dim - LANES)
            target = keys + d * TILE_BYTES + 4 * place
            if is_bf16:
                transposing_load_bf16(slots + 8 * place, 2 * d, target, TILE_BYTES)
            else:
                transposing_load_f32(slots + 8 * place, 4 * d, target, TILE_BYTES)
    if in_place:
        copy_bytes(values, slots + 8 * TILE, 8 * TILE)
        return
    stride = _padded_bytes(value_dim)
    for place in range(num_places):
        source = load_i64(slots + 8 * (TILE + place))
        target = values + place * stride
        for column in range(0, value_dim, LANES):
            d = min(column, value_dim - LANES)
            if is_bf16:
                vstore(target + 4 * d, vload_bf16(source + 2 * d))
            else:
                vstore(target + 4 * d, vload(source + 4 * d))
