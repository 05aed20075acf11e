"""A row-invariant linear layer on the CPU: prepacked oneDNN.

Not here: which modules of a model get it (engine/model/row_invariant_modules). Not for bf16 with AMX, where oneDNN is
not row-invariant (320 x 864, single rows of 17 x 33): there bf16 weights go to cpu_panels.

Row-invariant for 2 to 1024 rows (AMD EPYC with AVX512-BF16, torch 2.13, K 7 to 11008, N 7 to 32001, bf16 and fp32). A
single row differs at large K (from about 1500) and is then run as four. Speed against F.linear out of cache, 1-16 rows:
1.5-3 x in bf16, 2-4 x in fp32; about equal at 256.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.functional import pad

# rows; largest call, more are split. oneDNN keeps 0.4-0.6 MB of code per weight shape and row count (log: 9fffff3), so
# row counts are padded: all up to 16, multiples of 4 up to 64, of 16 up to 128
TILE_ROWS = 128
_PADDED_ROWS = 4
# weights; from here on memory-bound, and four rows cost less than one or two (bf16 1024 x 1024: 68 us, 70, 74)
_MEMORY_BOUND_WEIGHTS = 500_000


def supports(dtype: torch.dtype) -> bool:
    """Returns whether oneDNN can prepack weights of this dtype on this CPU."""
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

    Fewer than min_rows rows are padded to four; min_rows: from fewest_rows().
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
    """The smallest row count >= num_rows that oneDNN is called with."""
    if num_rows <= 16:
        return num_rows
    step = 4 if num_rows <= 64 else 16
    return num_rows + -num_rows % step


def _onednn(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")  # type: ignore[no-any-return]


def fewest_rows(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
    """The smallest row count, 1 or 4, that linear() may pass to oneDNN unpadded for weights of this shape."""
    if num_outputs * num_inputs >= _MEMORY_BOUND_WEIGHTS:
        return _PADDED_ROWS
    differs = _single_row_differs(num_outputs, num_inputs, dtype, torch.get_num_threads())
    return _PADDED_ROWS if differs else 1


@lru_cache(maxsize=256)
def _single_row_differs(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_threads: int) -> bool:
    # Weights and inputs cancel exactly and leave the rounding noise of the summation order: another order shows in
    # nearly every output, even after rounding to bf16.
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
