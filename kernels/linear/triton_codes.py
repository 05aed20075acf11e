"""Row-invariant linears on quantised weights, on an NVIDIA GPU (triton): codes stay packed, and no weight is rounded.

The law is coded_reference's, but for the order inside a group, which is that of the matrix multiply-add: one chain in
float32 for each group of inputs in ascending order, then scaled. A row's bits depend on that row alone: a program has
whole outputs, there is no split-K, the tile is the weight's, and one kernel sums the inputs of all groups.

Minimum traffic at 1 row, 4 bits in groups of 128: 4096 x 4096 8.7 MB, 2.6 us at 3.35 TB/s (H100), 1.8 us at 4.8 TB/s
(H200). Measured there: 36 us, where bf16 takes 12. Not here: how codes lie in memory (triton_code_blocks).
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear.triton_code_blocks import CodeBlocks, Part
from outrider.kernels.linear.triton_tiles import row_block, tile_config
from outrider.kernels.triton_numbers import dot_in_fp32, fma_in_fp32, round_to, runs_on

# rows and groups; summed by one program, for any number of either
_SUMMED_ROWS, _SUMMED_GROUPS = 8, 8


@triton.jit
def _numbers(code, low, table, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of a weight as bf16, exact. code: uint8, of 4 bits where KIND is "range" or "table".

    By way of fp32: the interpreter does not convert integers to bf16.
    """
    if KIND == "e4m3":
        # float16 has more exponents, 2**8 apart, subnormal ones too. tl.float8e4nv would need compute capability 8.9.
        half = ((code & 0x7F).to(tl.uint16) << 7) | ((code & 0x80).to(tl.uint16) << 8)
        number = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    elif KIND == "i8":
        number = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif KIND == "table":
        word = tl.where(code < 8, tl.load(table), tl.load(table + 1))
        number = (word >> ((code & 7) * 8).to(tl.int64)).to(tl.int8).to(tl.float32)
    else:
        number = (code.to(tl.int32) + low).to(tl.float32)
    return number.to(tl.bfloat16)


@triton.jit
def _add_group(  # type: ignore[no-untyped-def]
    total, part, group, scales, minimums, x_sums, outputs, rows, is_output, is_row, num_outputs, num_rows,
    SCALE_GROUPS: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
):  # fmt: skip
    """total + part * the group's scale, and then the sum of the group's inputs times its minimum."""
    at = group // SCALE_GROUPS * num_outputs + outputs
    scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
    total = fma_in_fp32(part, scale[:, None], total)
    if HAS_MINIMUMS:
        minimum = tl.load(minimums + at, mask=is_output, other=0.0).to(tl.float32)
        x_sum = tl.load(x_sums + group * num_rows + rows, mask=is_row, other=0.0)
        total = fma_in_fp32(minimum[:, None], x_sum[None, :], total)
    return total


# Not specialised on num_rows: 1 and multiples of 16 would each compile another kernel.
@triton.jit(do_not_specialize=["num_rows", "low"])
def _linear(  # type: ignore[no-untyped-def]
    x, codes, table, scales, minimums, x_sums, bias, out, low, num_rows, num_outputs, x_stride, out_stride,
    NUM_INPUTS: tl.constexpr, NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP_INPUTS: tl.constexpr,
    SCALE_GROUPS: tl.constexpr, HALVES: tl.constexpr, TWO_GROUPS: tl.constexpr, PADS: tl.constexpr,
    KIND: tl.constexpr, HAS_MINIMUMS: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One tile of outputs. Grid (tiles of outputs, blocks of rows)."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    inputs = tl.arange(0, WIDTH)
    x_tile = x + rows.to(tl.int64)[None, :] * x_stride
    code_tile = codes + outputs[:, None] * WIDTH + inputs[None, :]
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    part = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    for block in range(NUM_BLOCKS):
        code = tl.load(code_tile, mask=is_output[:, None], other=0)
        code_tile += num_outputs * WIDTH
        for half in tl.static_range(HALVES):
            group = block * 2 + half if TWO_GROUPS else block
            place = inputs if TWO_GROUPS else inputs + half * WIDTH
            column = group * GROUP_INPUTS + place
            x_mask = is_row[None, :]
            if PADS:
                x_mask = x_mask & ((place < GROUP_INPUTS) & (column < NUM_INPUTS))[:, None]
            x_part = tl.load(x_tile + column[:, None], mask=x_mask, other=0.0)
            numbers = _numbers((code >> (4 * half)) & 0xF if HALVES == 2 else code, low, table, KIND)
            part = dot_in_fp32(numbers, x_part, part)
            if TWO_GROUPS or half == HALVES - 1:
                total = _add_group(
                    total, part, group, scales, minimums, x_sums, outputs, rows, is_output, is_row,
                    num_outputs, num_rows, SCALE_GROUPS, HAS_MINIMUMS,
                )  # fmt: skip
                part = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_tile = out + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    tl.store(out_tile, round_to(tl.trans(total), tl.bfloat16), mask=is_row[:, None] & is_output[None, :])


# Specialised on nothing, so that all rows are summed by one kernel: another would sum in another order.
@triton.jit(do_not_specialize=["x", "x_sums", "num_rows", "x_stride"])
def _sums(  # type: ignore[no-untyped-def]
    x, x_sums, num_rows, x_stride,
    NUM_INPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_INPUTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """The sum of each group's inputs, [groups, rows]. Grid (blocks of rows, blocks of groups): sixteen chains a sum."""
    sums = tl.arange(0, BLOCK_ROWS * BLOCK_GROUPS)
    row = tl.program_id(0) * BLOCK_ROWS + sums % BLOCK_ROWS
    group = tl.program_id(1) * BLOCK_GROUPS + sums // BLOCK_ROWS
    is_sum = (row < num_rows) & (group < NUM_GROUPS)
    lanes = tl.arange(0, 16)
    chains = tl.zeros((BLOCK_ROWS * BLOCK_GROUPS, 16), dtype=tl.float32)
    for first in range(0, GROUP_INPUTS, 16):
        column = group[:, None] * GROUP_INPUTS + first + lanes[None, :]
        mask = is_sum[:, None] & (first + lanes < GROUP_INPUTS)[None, :] & (column < NUM_INPUTS)
        inputs = tl.load(x + row.to(tl.int64)[:, None] * x_stride + column, mask=mask, other=0.0)
        chains += inputs.to(tl.float32)
    tl.store(x_sums + group * num_rows + row, tl.sum(chains, axis=1), mask=is_sum)


@triton.jit(do_not_specialize=["low", "num_outputs"])
def _rows(  # type: ignore[no-untyped-def]
    ids, codes, table, scales, minimums, order, out, low, num_outputs,
    NUM_INPUTS: tl.constexpr, WIDTH: tl.constexpr, GROUP_INPUTS: tl.constexpr, SCALE_GROUPS: tl.constexpr,
    HALVES: tl.constexpr, TWO_GROUPS: tl.constexpr, KIND: tl.constexpr, HAS_MINIMUMS: tl.constexpr,
    HAS_ORDER: tl.constexpr,
):  # fmt: skip
    """A block of one output's weights. Grid (ids, blocks). An id outside has NaN."""
    row, block = tl.program_id(0), tl.program_id(1)
    output = tl.load(ids + row)
    is_known = (output >= 0) & (output < num_outputs)
    inputs = tl.arange(0, WIDTH)
    at = (block.to(tl.int64) * num_outputs + output) * WIDTH
    code = tl.load(codes + at + inputs, mask=is_known & (inputs >= 0), other=0)
    for half in tl.static_range(HALVES):
        group = block * 2 + half if TWO_GROUPS else block
        place = inputs if TWO_GROUPS else inputs + half * WIDTH
        column = group * GROUP_INPUTS + place
        is_input = (place < GROUP_INPUTS) & (column < NUM_INPUTS)
        of_group = group // SCALE_GROUPS * num_outputs + output
        numbers = _numbers((code >> (4 * half)) & 0xF if HALVES == 2 else code, low, table, KIND)
        weights = numbers.to(tl.float32) * tl.load(scales + of_group, mask=is_known, other=float("nan")).to(tl.float32)
        if HAS_MINIMUMS:
            weights += tl.load(minimums + of_group, mask=is_known, other=0.0).to(tl.float32)
        if HAS_ORDER:
            column = tl.load(order + column, mask=is_input, other=0)
        tl.store(out + row.to(tl.int64) * NUM_INPUTS + column, round_to(weights, tl.bfloat16), mask=is_input)


def supports(dtype: torch.dtype, device_type: str) -> bool:
    """Returns whether codes can be multiplied with rows of this dtype on such a device."""
    return dtype == torch.bfloat16 and runs_on(device_type)


def linear(x: torch.Tensor, packed: CodeBlocks, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [..., K], bias bf16 [N], contiguous, or None; returns bf16 [..., N].

    Raises KernelArgumentError for another width or dtype.
    """
    return linear_tiled(x, packed, bias)


def linear_tiled(
    x: torch.Tensor,
    packed: CodeBlocks,
    bias: torch.Tensor | None = None,
    *,
    block_rows: int | None = None,
    block_outputs: int | None = None,
) -> torch.Tensor:
    """Computes `linear` with the given blocks, which tests and timings choose."""
    num_outputs = packed.num_outputs
    require_fitting(x, packed, bias)
    rows = in_order(x, packed)
    out = x.new_empty((*x.shape[:-1], num_outputs))
    if rows.shape[0] == 0:
        return out
    sums: dict[tuple[int, int], torch.Tensor] = {}
    first = 0
    for part in packed.parts:
        own = slice(first, first + part.num_outputs)
        shape = (part.num_groups, part.group_inputs)
        if part.minimums is not None and shape not in sums:
            sums[shape] = _sums_of(rows, *shape)
        own_bias = None if bias is None else bias[own]
        _launch(rows, part, sums.get(shape), own_bias, out.view(-1, num_outputs)[:, own], block_rows, block_outputs)
        first += part.num_outputs
    return out


def require_fitting(x: torch.Tensor, packed: CodeBlocks, bias: torch.Tensor | None) -> None:
    """Checks x and bias against the packed weight. Raises KernelArgumentError."""
    num_outputs, num_inputs = packed.num_outputs, packed.num_inputs
    if x.dtype != torch.bfloat16 or x.shape[-1] != num_inputs:
        expected = f"bfloat16 [..., {num_inputs}]"
        raise KernelArgumentError(f"x is {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, expected {expected}")
    if bias is not None and (bias.shape != (num_outputs,) or bias.dtype != x.dtype or not bias.is_contiguous()):
        raise KernelArgumentError(f"bias {tuple(bias.shape)} ({bias.dtype}) does not fit {num_outputs} outputs")


def in_order(x: torch.Tensor, packed: CodeBlocks) -> torch.Tensor:
    """x as rows [T, K] in the codes' order, of stride 1."""
    rows = x.reshape(-1, packed.num_inputs)
    if packed.order is not None:
        return rows.index_select(1, packed.order)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _sums_of(rows: torch.Tensor, num_groups: int, group_inputs: int) -> torch.Tensor:
    """rows [T, K] -> float32 [groups, T]"""
    num_rows, num_inputs = rows.shape
    sums = torch.empty((num_groups, num_rows), dtype=torch.float32, device=rows.device)
    _sums[(triton.cdiv(num_rows, _SUMMED_ROWS), triton.cdiv(num_groups, _SUMMED_GROUPS))](
        rows, sums, num_rows, rows.stride(0), NUM_INPUTS=num_inputs, NUM_GROUPS=num_groups, GROUP_INPUTS=group_inputs,
        BLOCK_ROWS=_SUMMED_ROWS, BLOCK_GROUPS=_SUMMED_GROUPS, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return sums


def _launch(
    rows: torch.Tensor, part: Part, x_sums: torch.Tensor | None, bias: torch.Tensor | None, out: torch.Tensor,
    block_rows: int | None, block_outputs: int | None,
) -> None:  # fmt: skip
    """rows [T, K], in the codes' order; out [T, N]."""
    num_rows, num_inputs = rows.shape
    # The tile for one row serves any number of rows: another tile could use another multiply-add (triton_tiles).
    tile = tile_config(part.num_outputs, num_inputs, rows.dtype)
    block_rows, block_outputs = block_rows or row_block(num_rows), block_outputs or tile.block_outputs
    # The stride of a single row is arbitrary, as in triton.
    x_stride, out_stride = (num_inputs, part.num_outputs) if num_rows == 1 else (rows.stride(0), out.stride(0))
    _linear[(triton.cdiv(part.num_outputs, block_outputs), triton.cdiv(num_rows, block_rows))](
        rows, part.codes, given_or(part.table, part.codes), part.scales, given_or(part.minimums, part.scales),
        given_or(x_sums, rows), given_or(bias, rows), out, part.low, num_rows, part.num_outputs, x_stride, out_stride,
        NUM_INPUTS=num_inputs, NUM_BLOCKS=part.codes.shape[0], **layout(part), PADS=part.pads(num_inputs),
        HAS_BIAS=bias is not None, BLOCK_ROWS=block_rows, BLOCK_OUTPUTS=block_outputs,
        num_warps=tile.num_warps, num_stages=num_stages(block_rows), enable_fp_fusion=False,
    )  # fmt: skip


def num_stages(block_rows: int) -> int:
    """Returns the number of pipeline stages whose shared memory, at most 90 KB, fits every device from 8.0 on."""
    return 4 if block_rows <= 64 else 2


def layout(part: Part) -> dict[str, Any]:
    return {
        "WIDTH": part.codes.shape[2],
        "GROUP_INPUTS": part.group_inputs,
        "SCALE_GROUPS": part.scale_groups,
        "HALVES": 2 if part.is_narrow else 1,
        "TWO_GROUPS": part.has_two_groups,
        "KIND": part.kind,
        "HAS_MINIMUMS": part.minimums is not None,
    }


def given_or(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor:
    """Returns the tensor, or `other` as a placeholder: the kernel does not read it but needs some tensor."""
    return other if tensor is None else tensor


def rows(ids: torch.Tensor, packed: CodeBlocks) -> torch.Tensor:
    """Dequantised weights of the outputs that ids int64 [...] names, bf16 [..., K]: an embedding that shares them.

    Those of an id outside are NaN. Raises KernelArgumentError for packed weights of several parts.
    """
    if len(packed.parts) > 1 or ids.dtype != torch.int64:
        raise KernelArgumentError("rows of one weight are read by int64 ids")
    (part,) = packed.parts
    ids = ids.contiguous()
    out = torch.empty((*ids.shape, packed.num_inputs), dtype=torch.bfloat16, device=part.codes.device)
    if ids.numel():
        _rows[(ids.numel(), part.codes.shape[0])](
            ids, part.codes, given_or(part.table, part.codes), part.scales, given_or(part.minimums, part.scales),
            given_or(packed.order, ids), out, part.low, part.num_outputs,
            NUM_INPUTS=packed.num_inputs, **layout(part), HAS_ORDER=packed.order is not None,
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return out
