"""A row-invariant linear layer on an NVIDIA GPU (triton).

The weight's rows are the M side of the matrix multiply-add, the input rows the N side: 16 rows fill a program, and up
to 64 read the weight once. Each output is one fp32 sum over the inputs in ascending order. No split-K: narrow weights
get narrower tiles instead (triton_tiles).

Minimum traffic at 1 row, bf16: 4096 x 4096 33.6 MB, 10.0 us at 3.35 TB/s (H100), 7.0 us at 4.8 TB/s (H200);
28672 x 4096 235 MB, 70 and 49 us. Not here: which modules of a model get it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear.triton_tiles import Tile, row_block, tile_config
from outrider.kernels.triton_numbers import dot_in_fp32, round_to, runs_on

# blocks of outputs scheduled together, to share inputs and weights in L2
_GROUP = 8


# Not specialised on num_rows: 1 and multiples of 16 would each compile another kernel.
@triton.jit(do_not_specialize=["num_rows"])
def _linear(  # type: ignore[no-untyped-def]
    x, weight, bias, out, num_rows, num_outputs, x_stride, weight_stride, out_stride,
    x_linear_stride, weight_linear_stride, out_linear_stride,
    NUM_INPUTS: tl.constexpr, HAS_BIAS: tl.constexpr, GROUP: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr, BLOCK_INPUTS: tl.constexpr,
):  # fmt: skip
    """One tile of outputs. Grid (tiles, linears of one shape).

    No cache hint on the weights: triton 3.6 drops it where loads become cp.async.
    """
    which = tl.program_id(1).to(tl.int64)
    x += which * x_linear_stride
    weight += which * weight_linear_stride
    out += which * out_linear_stride
    num_row_blocks = tl.cdiv(num_rows, BLOCK_ROWS)
    per_group = GROUP * num_row_blocks
    first_block = tl.program_id(0) // per_group * GROUP
    group = tl.minimum(tl.cdiv(num_outputs, BLOCK_OUTPUTS) - first_block, GROUP)
    place = tl.program_id(0) % per_group
    outputs = (first_block + place % group) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = (place // group) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    inputs = tl.arange(0, BLOCK_INPUTS)

    weight_tile = weight + outputs.to(tl.int64)[:, None] * weight_stride + inputs[None, :]
    x_tile = x + rows.to(tl.int64)[None, :] * x_stride + inputs[:, None]
    is_output, is_row = outputs < num_outputs, rows < num_rows
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    for first in range(0, NUM_INPUTS, BLOCK_INPUTS):
        weight_mask, x_mask = is_output[:, None], is_row[None, :]
        if NUM_INPUTS % BLOCK_INPUTS:
            weight_mask = weight_mask & (inputs < NUM_INPUTS - first)[None, :]
            x_mask = x_mask & (inputs < NUM_INPUTS - first)[:, None]
        weights = tl.load(weight_tile, mask=weight_mask, other=0.0)
        total = dot_in_fp32(weights, tl.load(x_tile, mask=x_mask, other=0.0), total)
        weight_tile += BLOCK_INPUTS
        x_tile += BLOCK_INPUTS

    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_tile = out + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    rounded = round_to(tl.trans(total), out.dtype.element_ty)
    tl.store(out_tile, rounded, mask=is_row[:, None] & is_output[None, :])


def supports(weight: torch.Tensor) -> bool:
    """Returns whether linear takes this weight."""
    is_matrix = weight.ndim == 2 and weight.stride(1) == 1
    return is_matrix and weight.dtype in (torch.bfloat16, torch.float32) and runs_on(weight.device.type)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [..., K], weight [N, K], bias [N] or None; returns [..., N].

    All share a dtype (bf16 or fp32). Raises KernelArgumentError.
    """
    if weight.ndim != 2:
        raise KernelArgumentError(f"weight {tuple(weight.shape)} is not a matrix")
    num_rows = x.numel() // max(1, x.shape[-1])
    tile = tile_config(weight.shape[0], weight.shape[1], weight.dtype, num_rows)
    return linear_tiled(x, weight, bias, tile, row_block(num_rows))


def linear_tiled(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, tile: Tile, block_rows: int
) -> torch.Tensor:
    """Computes `linear` with the given tiles, which tests and timings choose."""
    num_outputs, num_inputs = weight.shape
    if x.dtype != weight.dtype or x.shape[-1] != num_inputs or not supports(weight):
        raise KernelArgumentError(f"x {tuple(x.shape)} ({x.dtype}), weight {tuple(weight.shape)} ({weight.dtype})")
    if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise KernelArgumentError(f"bias {tuple(bias.shape)} ({bias.dtype}) does not fit {num_outputs} outputs")
    rows = x.reshape(-1, num_inputs)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    num_rows = rows.shape[0]
    out = x.new_empty((*x.shape[:-1], num_outputs))
    if num_rows == 0:
        return out
    _launch(rows[None], weight[None], bias, out.view(1, num_rows, num_outputs), tile, block_rows)
    return out


def linears(x: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
    """B linears of one shape in one launch: x [B, T, K], weights [B, N, K], out [B, T, N], of one dtype; contiguous in
    the last dimension, weights whole. The bits are those of `linear`. Raises KernelArgumentError."""
    num_linears, num_outputs, num_inputs = weights.shape
    num_rows = x.shape[1]
    fits = x.shape == (num_linears, num_rows, num_inputs) and out.shape == (num_linears, num_rows, num_outputs)
    is_plain = x.stride(2) == out.stride(2) == 1 and weights.is_contiguous() and supports(weights[0])
    if not fits or not is_plain or {x.dtype, out.dtype} != {weights.dtype}:
        given = f"x {tuple(x.shape)} ({x.dtype}), out {tuple(out.shape)} ({out.dtype})"
        raise KernelArgumentError(f"{given} do not fit weights {tuple(weights.shape)} ({weights.dtype})")
    if num_rows > 0:
        tile = tile_config(num_outputs, num_inputs, weights.dtype, num_rows)
        _launch(x, weights, None, out, tile, row_block(num_rows))


def _launch(
    x: torch.Tensor, weights: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor, tile: Tile, block_rows: int
) -> None:
    """x [B, T, K], weights [B, N, K], out [B, T, N]."""
    num_linears, num_outputs, num_inputs = weights.shape
    num_rows = x.shape[1]
    # Triton specialises on 1 and multiples of 16: the stride of a single row is arbitrary, and from one linear to the
    # next it depends on the number of rows.
    is_single = num_rows == 1
    strides = (0, 0, 0) if num_linears == 1 else (x.stride(0), weights.stride(0), out.stride(0))
    _linear[(triton.cdiv(num_rows, block_rows) * triton.cdiv(num_outputs, tile.block_outputs), num_linears)](
        x, weights, weights if bias is None else bias, out,
        num_rows, num_outputs,
        num_inputs if is_single else x.stride(1), weights.stride(1), num_outputs if is_single else out.stride(1),
        *strides,
        NUM_INPUTS=num_inputs, HAS_BIAS=bias is not None,
        GROUP=_GROUP, BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=tile.block_outputs, BLOCK_INPUTS=tile.block_inputs,
        num_warps=tile.num_warps, num_stages=tile.stages(block_rows, x.element_size()),
    )  # fmt: skip
