"""A linear layer on CPU whose rows have the same bits whatever their number and place: prepacked oneDNN.

Not here: which modules of a model get it (engine/row_invariant_modules). Not for bf16 on CPUs with AMX, where oneDNN
gives a row other bits among other numbers of rows (from 320 x 864 on, and single rows of 17 x 33): bf16 weights of all
shapes go to cpu_panels there.
Measured on an AMD EPYC with AVX512-BF16, torch 2.13, K from 7 to 11008, N from 7 to 32001, bf16 and fp32: the
bits of a row agree for every row count from 2 to 1024 and every place. A call with one row differs at large K
(from about 1500 on; random data shows it in bf16 only from 2816 on, cancelling data at once), so a single row
is run as four where it would. Against F.linear, out of cache: 1.5-3 x faster at 1-16 rows in bf16, 2-4 x in
fp32, and about equal at 256.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import pad

# oneDNN makes a program for every row count of every shape of weights and keeps it, 0.6 MB each: under requests of all
# lengths a verifier of the demo model grew from 475 to 920 MB in five minutes, now to 520. So only these row counts are
# asked for: all up to 16, then every fourth up to 64, every 16th up to 128; more rows are run in tiles of 128. CPU
# time of a call where every call has another row count, all seen before: 0.20 ms instead of 0.74 from 17 to 64 rows,
# 1.0 instead of 1.7 from 129 to 299; of 256 or 512 rows alone, within 10 % of one call's.
TILE_ROWS = 128
_PADDED_ROWS = 4
# From this many weights on the call waits for memory, and four rows cost less than two or one (bf16 1024 x 1024:
# 1 row 70 us, 2 rows 74, 4 rows 68, 6 rows 69; fp32 1024 x 2816: 307, 347, 267, 273).
_MEMORY_BOUND_WEIGHTS = 500_000


def supports(dtype: torch.dtype) -> bool:
    """Whether oneDNN can prepack weights of this dtype on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Weight [N, K] in oneDNN's own layout (an opaque tensor of the same size in bytes)."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)  # type: ignore[no-any-return]


def linear(
    x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None = None, *, min_rows: int = _PADDED_ROWS
) -> torch.Tensor:
    """x [..., K], packed from pack(weight [N, K]), bias [N] or None; returns [..., N].

    Fewer than min_rows rows are padded to four; 1 is allowed where fewest_rows() says so.
    """
    num_rows = x.numel() // x.shape[-1]
    if min_rows <= num_rows == _padded_count(num_rows) <= TILE_ROWS:
        return _onednn(x, packed, bias)
    rows = x.reshape(num_rows, x.shape[-1])
    if num_rows == 0:
        out = x.new_empty((0, packed.shape[0]))
    elif num_rows == 1:
        out = _onednn(rows.expand(_PADDED_ROWS, -1), packed, bias)[:1]
    elif num_rows < min_rows:
        out = _onednn(torch.cat((rows, rows))[:_PADDED_ROWS], packed, bias)[:num_rows]
    elif num_rows <= TILE_ROWS:
        out = _onednn(pad(rows, (0, 0, 0, _padded_count(num_rows) - num_rows)), packed, bias)[:num_rows]
    else:
        out = torch.cat([linear(tile, packed, bias) for tile in torch.split(rows, TILE_ROWS)])
    return out.view(*x.shape[:-1], packed.shape[0])


def _padded_count(num_rows: int) -> int:
    """The least row count from num_rows on that is asked of oneDNN."""
    if num_rows <= 16:
        return num_rows
    step = 4 if num_rows <= 64 else 16
    return num_rows + -num_rows % step


def _onednn(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def fewest_rows(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
    """The least row count that linear() may hand to oneDNN unpadded for weights of this shape: 1 or 4."""
    if num_outputs * num_inputs >= _MEMORY_BOUND_WEIGHTS:
        return _PADDED_ROWS
    differs = _single_row_differs(num_outputs, num_inputs, dtype, torch.get_num_threads())
    return _PADDED_ROWS if differs else 1


@lru_cache(maxsize=256)
def _single_row_differs(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_threads: int) -> bool:
    # Weights and inputs cancel exactly, so what is left is rounding noise of the summation order alone: any
    # other order shows in nearly every output, also after rounding to bf16.
    generator = torch.Generator().manual_seed(num_outputs * 1_000_003 + num_inputs)
    half = num_inputs // 2
    weight = torch.randn(num_outputs, num_inputs, generator=generator).to(dtype)
    weight[:, half : 2 * half] = weight[:, :half]
    x = torch.randn(16, num_inputs, generator=generator).to(dtype)
    x[:8, half : 2 * half] = -x[:8, :half]
    packed = pack(weight)
    many = _onednn(x, packed, None)
    single = torch.cat([_onednn(row[None], packed, None) for row in x])
    return not torch.equal(many, single)
