"""Attention over a paged cache on an NVIDIA GPU: reads the cache once per tile of rows, bitwise row-invariant.

Checks shapes, allocates buffers and launches; the kernels are `triton_splits` and `triton_combine`. A row's output bits
depend on its query, on the keys and values it sees in logical order, and on its logical position; not on its tile,
batch, tree, block layout or the width of block_tables. Required for that: enable_fp_fusion=False, since the compiler
may contract multiply-adds differently in each variant. Limit: an inf or NaN among the values of a later chain row
spoils earlier rows of the same tile (0 * inf); unused slots may hold anything.

Nothing is read back from the device; grids and buffers follow from shapes alone: safe under CUDA graphs.

Minimum traffic at 32 sessions of 4096 positions, Hkv 8, D 128, bf16: 537 MB of keys and values, 160 us at 3.35 TB/s
(H100), 112 us at 4.8 TB/s (H200). Split states add 0.8 % of writes and reads at one row per session, 6 % at eight
(Hq 32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_codes.layout import is_coded
from outrider.kernels.kv_codes.triton import as_arguments
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring
from outrider.kernels.paged_attention.triton_combine import combine_splits
from outrider.kernels.paged_attention.triton_splits import E4M3, INT8, attend_splits

# positions per split; determines the bits, so it must not depend on load
SPLIT = 512
# programs per tile; with more splits each takes several: wide tables of short contexts launch few idle programs
MAX_SPLIT_PROGRAMS = 32
# bytes of split states; above it (large prefills) each tile is one program and stores none
MAX_PART_BYTES = 256 << 20
_LOG2E = math.log2(math.e)
_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}
_CODES = {torch.int8: INT8.value, torch.float8_e4m3fn: E4M3.value}


@dataclass(frozen=True)
class TileConfig:
    """Tile shape. A row's bits may depend on it: a function of head shapes and dtype alone."""

    rows: int  # rows of a session per tile
    block_m: int  # rows x heads of a group, padded
    block_n: int  # positions
    num_warps: int
    num_stages: int


def tile_config(group: int, head_dim: int, value_dim: int, dtype: torch.dtype) -> TileConfig:
    """The tile for a group of query heads; the same for decode and verify.

    bf16: 8 rows up to a group of 8. A block of keys and values is 32 KB (D 128); with 5 stages two more are in flight
    in each of the two programs per SM: 128 KB, where HBM latency needs some 40.
    fp32: no tensor cores, unrolled code; hence small tiles.
    """
    padded = triton.next_power_of_2(max(head_dim, value_dim))
    if dtype == torch.bfloat16:
        block_m = max(32 if group <= 4 else 64, triton.next_power_of_2(group))
        return TileConfig(block_m // group, block_m, 64 if padded <= 128 else 32, 4 if block_m <= 64 else 8, 5)
    block_m = max(16, triton.next_power_of_2(group))
    return TileConfig(block_m // group, block_m, 32 if padded <= 128 else 16, 4, 2)


def latent_tile_config(group: int, dtype: torch.dtype) -> TileConfig:
    """The tile for keys of latents, whose first part is the value too: 512 + 64 elements for DeepSeek-V3.

    bf16: sums of 32 x 512 take 64 registers a thread; a block of keys is 36 KB, and so are the queries.
    """
    block_m = 32 if dtype == torch.bfloat16 else 16
    return TileConfig(block_m // group, block_m, block_m, 8, 2)


def _rest_dim(key_cache: torch.Tensor, value_cache: torch.Tensor) -> int:
    """Elements of a key behind its value, if values are the first part of the keys of one head; else 0."""
    is_view = key_cache.data_ptr() == value_cache.data_ptr() and key_cache.stride() == value_cache.stride()
    return key_cache.shape[3] - value_cache.shape[3] if is_view and key_cache.shape[1] == 1 else 0


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: BatchTables,
    scoring: Scoring,
) -> torch.Tensor:
    """See `arguments.PagedAttention`; query is bf16 or fp32, caches too or coded. Codes are computed with in the
    query's dtype, which holds them exactly; their scales are fp32 factors of single scores and weights, so a row's bits
    depend on no more than without them.

    Rows from query_starts[-1] on are padding: not computed, their output unspecified. Raises KernelArgumentError for
    wrong shapes and dtypes; the contents of the tables are not checked.
    """
    _check(query, key_cache, value_cache, tables, scoring)
    block_tables, context_lens, query_starts, tree_starts, _parents = tables
    scaling, softcap, sinks = scoring.scaling, scoring.softcap, scoring.sinks
    window = scoring.window()
    num_rows, num_heads, head_dim = query.shape
    _, num_kv_heads, block_size, value_dim = value_cache.shape
    num_sessions = context_lens.shape[0]
    out = query.new_empty((num_rows, num_heads, value_dim))
    if num_rows == 0 or num_sessions == 0:
        return out
    codes = _CODES.get(key_cache.dtype, 0)
    compute_dtype = query.dtype if codes or query.dtype == key_cache.dtype else torch.float32
    rest_dim = _rest_dim(key_cache, value_cache)
    if rest_dim:
        # Blocks of heads as heads of their own over the same keys: one tile cannot hold all.
        num_kv_heads = num_heads // math.gcd(num_heads, 32 if compute_dtype == torch.bfloat16 else 16)
        key_cache = key_cache.expand(-1, num_kv_heads, -1, -1)
        value_cache = key_cache
    (keys, key_scales), (values, value_scales) = as_arguments(key_cache), as_arguments(value_cache)
    group = num_heads // num_kv_heads
    config = tile_config(group, head_dim, value_dim, compute_dtype)
    if rest_dim:
        config = latent_tile_config(group, compute_dtype)
    num_splits = triton.cdiv(block_tables.shape[1] * block_size, SPLIT)
    num_parts = num_rows * num_heads * num_splits
    is_fused = num_splits == 1 or num_parts * value_dim * 4 > MAX_PART_BYTES
    part_sums = out if is_fused else out.new_empty((num_parts, value_dim), dtype=torch.float32)
    part_states = out if is_fused else out.new_empty((num_parts, 2), dtype=torch.float32)
    sink_logits = out if sinks is None else sinks
    num_programs = 1 if is_fused else min(num_splits, MAX_SPLIT_PROGRAMS)
    padded_value_dim = max(16, triton.next_power_of_2(value_dim))
    attend_splits[num_rows // config.rows + num_sessions, num_kv_heads, num_programs](
        query, keys, values, key_scales, value_scales, out, part_sums, part_states, sink_logits, *tables,
        num_sessions, num_splits, num_heads, block_tables.stride(0), *query.stride()[:2],
        *key_cache.stride()[:3], *value_cache.stride()[:3], *window, *_score_factors(scaling, softcap),
        GROUP=group, ROWS=config.rows, BLOCK_M=config.block_m, BLOCK_N=config.block_n, SPLIT=SPLIT,
        BLOCK_SIZE=block_size, DIM=head_dim - rest_dim,
        PADDED_DIM=max(16, triton.next_power_of_2(head_dim - rest_dim)),
        REST_DIM=rest_dim, PADDED_REST_DIM=max(16, triton.next_power_of_2(max(1, rest_dim))),
        VALUE_DIM=value_dim, PADDED_VALUE_DIM=padded_value_dim, COMPUTE=_DTYPES[compute_dtype],
        HAS_WINDOW=window[0] > 0, HAS_SOFTCAP=softcap is not None, HAS_SINKS=sinks is not None,
        IS_FUSED=is_fused, CODES=codes,
        num_warps=config.num_warps, num_stages=config.num_stages, enable_fp_fusion=False,
    )  # fmt: skip
    if not is_fused:
        combine_splits[num_rows, num_heads](
            part_sums, part_states, out, sink_logits, context_lens, query_starts, tree_starts,
            num_sessions, num_splits, num_heads, *window,
            SPLIT=SPLIT, UNROLL=4, VALUE_DIM=value_dim, PADDED_VALUE_DIM=padded_value_dim,
            HAS_WINDOW=window[0] > 0, HAS_SINKS=sinks is not None,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _score_factors(scaling: float, softcap: float | None) -> tuple[float, float]:
    """Factors of the scores before and after the softcap's tanh, which the kernel computes by exp2(2x log2(e))."""
    if softcap is None:
        return scaling * _LOG2E, 1.0
    return 2 * scaling / softcap * _LOG2E, softcap * _LOG2E


def _check(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: BatchTables,
    scoring: Scoring,
) -> None:
    for name, tensor, num_dims in (("query", query, 3), ("key_cache", key_cache, 4), ("value_cache", value_cache, 4)):
        is_known = tensor.dtype in _DTYPES or (name != "query" and is_coded(tensor))
        if tensor.dim() != num_dims or not is_known or tensor.stride(-1) != 1:
            raise KernelArgumentError(
                f"{name} is {tensor.dtype}; it must be bfloat16 or float32, or a cache of 8-bit codes, "
                f"{num_dims}-dimensional and contiguous in its last dimension"
            )
    if key_cache.shape[:3] != value_cache.shape[:3] or key_cache.dtype != value_cache.dtype:
        raise KernelArgumentError("key_cache and value_cache must agree in blocks, heads, block size and dtype")
    if query.shape[2] != key_cache.shape[3] or query.shape[1] % key_cache.shape[1]:
        raise KernelArgumentError(f"query {tuple(query.shape)} does not fit key_cache {tuple(key_cache.shape)}")
    num_sessions = tables.context_lens.shape[0]
    lengths = (num_sessions, num_sessions, num_sessions + 1, num_sessions, query.shape[0])
    for name, table, length in zip(BatchTables._fields, tables, lengths, strict=True):
        if table.dtype != torch.int32 or table.shape[0] != length or table.stride(-1) != 1:
            raise KernelArgumentError(f"{name} must be int32 with {length} rows, contiguous in its last dimension")
    if scoring.softcap is not None and scoring.softcap <= 0:
        raise KernelArgumentError(f"softcap={scoring.softcap} must be positive, or None")
    sinks = scoring.sinks
    if sinks is not None and (sinks.shape != (query.shape[1],) or sinks.stride(0) != 1):
        raise KernelArgumentError(f"sinks must have {query.shape[1]} contiguous entries, one per query head")
