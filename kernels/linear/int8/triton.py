"""Row-invariant linears on quantised weights in integers, on an NVIDIA GPU (triton): codes stay packed.

The law is int8.reference's, to the bit: sums of integers have no order. Codes lie as in triton_code_blocks, in blocks
of at least MIN_WIDTH inputs. Never ran on a GPU: nothing here is tuned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import triton_code_blocks as blocks
from outrider.kernels.linear import triton_codes
from outrider.kernels.linear.codes import Codes
from outrider.kernels.linear.int8 import reference
from outrider.kernels.linear.triton_tiles import row_block, tile_config
from outrider.kernels.triton_numbers import fma_in_fp32, round_to

# inputs; least of a tl.dot of bytes
MIN_WIDTH = 32
_NAMES = {"range": "w4a8", "table": "w4a8", "i8": "w8a8"}
_LARGEST = tl.constexpr(float(reference.LARGEST_CODE))
_SMALLEST = tl.constexpr(reference.SMALLEST_MAGNITUDE)
# Added to a float of at most 2**22, it leaves the nearest integer, ties to even, in the lower bits.
_ROUNDING = tl.constexpr(1.5 * 2**23)
_ROUNDING_BITS = tl.constexpr(0x4B400000)


@dataclass(frozen=True)
class Int8Blocks(blocks.CodeBlocks):
    """Weights packed as one linear."""

    group_inputs: int

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the parts' kinds, sorted, as of the CPU's."""
        return tuple(sorted({_NAMES[part.kind] for part in self.parts}))


@triton.jit(do_not_specialize=["num_rows", "x_stride"])
def _quantise(  # type: ignore[no-untyped-def]
    x, q, steps, sums, num_rows, x_stride,
    NUM_INPUTS: tl.constexpr, NUM_GROUPS: tl.constexpr, GROUP_INPUTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A group of a row: codes, zeros where no inputs are, step, and step times their sum. Grid (rows, groups)."""
    row, group = tl.program_id(0), tl.program_id(1)
    place = tl.arange(0, WIDTH)
    column = group * GROUP_INPUTS + place
    mask = (place < GROUP_INPUTS) & (column < NUM_INPUTS)
    values = tl.load(x + row.to(tl.int64) * x_stride + column, mask=mask, other=0.0).to(tl.float32)
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0)
    largest = tl.maximum(bits.to(tl.float32, bitcast=True), _SMALLEST)
    is_finite = bits < 0x7F800000
    largest = tl.where(is_finite, largest, float("nan"))
    factor = tl.div_rn(tl.full((), _LARGEST, tl.float32), largest)
    rounded = values * factor + _ROUNDING
    integers = tl.where(is_finite, rounded.to(tl.int32, bitcast=True) - _ROUNDING_BITS, 0)
    step = tl.div_rn(largest, tl.full((), _LARGEST, tl.float32))
    tl.store(q + row.to(tl.int64) * NUM_GROUPS * GROUP_INPUTS + column, integers.to(tl.int8), mask=place < GROUP_INPUTS)
    tl.store(steps + group * num_rows + row, step)
    tl.store(sums + group * num_rows + row, step * tl.sum(integers, axis=0).to(tl.float32))


@triton.jit
def _integers(code, low, table, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Codes of a weight as int8. code: uint8, of 4 bits where KIND is "range" or "table"."""
    if KIND == "i8":
        number = code.to(tl.int8, bitcast=True)
    elif KIND == "table":
        word = tl.where(code < 8, tl.load(table), tl.load(table + 1))
        number = (word >> ((code & 7) * 8).to(tl.int64)).to(tl.int8)
    else:
        number = (code.to(tl.int32) + low).to(tl.int8)
    return number


# Not specialised on num_rows: 1 and multiples of 16 would each compile another kernel.
@triton.jit(do_not_specialize=["num_rows", "low"])
def _linear(  # type: ignore[no-untyped-def]
    q, steps, sums, codes, table, scales, minimums, bias, out, low, num_rows, num_outputs, out_stride,
    NUM_GROUPS: tl.constexpr, NUM_BLOCKS: tl.constexpr, WIDTH: tl.constexpr, GROUP_INPUTS: tl.constexpr,
    SCALE_GROUPS: tl.constexpr, HALVES: tl.constexpr, TWO_GROUPS: tl.constexpr, KIND: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_OUTPUTS: tl.constexpr,
):  # fmt: skip
    """One tile of outputs. Grid (tiles of outputs, blocks of rows)."""
    outputs = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    is_output, is_row = outputs < num_outputs, rows < num_rows
    inputs = tl.arange(0, WIDTH)
    q_tile = q + rows.to(tl.int64)[None, :] * NUM_GROUPS * GROUP_INPUTS
    code_tile = codes + outputs[:, None] * WIDTH + inputs[None, :]
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.float32)
    part = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.int32)
    for block in range(NUM_BLOCKS):
        code = tl.load(code_tile, mask=is_output[:, None], other=0)
        code_tile += num_outputs * WIDTH
        for half in tl.static_range(HALVES):
            group = block * 2 + half if TWO_GROUPS else block
            place = inputs if TWO_GROUPS else inputs + half * WIDTH
            is_input = (place < GROUP_INPUTS) & (group < NUM_GROUPS)
            column = group * GROUP_INPUTS + place
            q_part = tl.load(q_tile + column[:, None], mask=is_row[None, :] & is_input[:, None], other=0)
            numbers = _integers((code >> (4 * half)) & 0xF if HALVES == 2 else code, low, table, KIND)
            part = tl.dot(numbers, q_part, part, out_dtype=tl.int32)
            if TWO_GROUPS or half == HALVES - 1:
                at = group // SCALE_GROUPS * num_outputs + outputs
                of_rows = group * num_rows + rows
                is_number = is_row & (group < NUM_GROUPS)
                scale = tl.load(scales + at, mask=is_output, other=0.0).to(tl.float32)
                step = tl.load(steps + of_rows, mask=is_number, other=0.0)
                total = fma_in_fp32(part.to(tl.float32), step[None, :] * scale[:, None], total)
                if HAS_MINIMUMS:
                    minimum = tl.load(minimums + at, mask=is_output, other=0.0).to(tl.float32)
                    q_sum = tl.load(sums + of_rows, mask=is_number, other=0.0)
                    total = fma_in_fp32(q_sum[None, :], minimum[:, None], total)
                part = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), dtype=tl.int32)
    if HAS_BIAS:
        total += tl.load(bias + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    out_tile = out + rows.to(tl.int64)[:, None] * out_stride + outputs[None, :]
    tl.store(out_tile, round_to(tl.trans(total), tl.bfloat16), mask=is_row[:, None] & is_output[None, :])


def takes_together(parts: Sequence[Codes]) -> bool:
    """Returns whether weights can be packed as one."""
    return reference.group_inputs(parts) is not None


def pack(codes: Sequence[Codes], device: torch.device | str = "cpu") -> Int8Blocks:
    """The weights one below the other, on device. Raises KernelArgumentError: they cannot be packed together."""
    size = reference.group_inputs(codes)
    if size is None:
        raise KernelArgumentError("these codes cannot be packed as one weight in integers")
    packed = blocks.pack(codes, device, group_inputs=size, min_width=MIN_WIDTH)
    return Int8Blocks(packed.num_outputs, packed.num_inputs, packed.parts, packed.order, size)


def linear(x: torch.Tensor, packed: Int8Blocks, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [..., K], bias bf16 [N], contiguous, or None; returns bf16 [..., N].

    Raises KernelArgumentError for another width or dtype.
    """
    num_outputs, num_inputs = packed.num_outputs, packed.num_inputs
    triton_codes.require_fitting(x, packed, bias)
    rows = triton_codes.in_order(x, packed)
    out = x.new_empty((*x.shape[:-1], num_outputs))
    num_rows = len(rows)
    if num_rows == 0:
        return out
    size, num_groups = packed.group_inputs, -(-num_inputs // packed.group_inputs)
    q = torch.empty((num_rows, num_groups * size), dtype=torch.int8, device=x.device)
    steps, sums = torch.empty((2, num_groups, num_rows), dtype=torch.float32, device=x.device)
    _quantise[(num_rows, num_groups)](
        rows, q, steps, sums, num_rows, rows.stride(0), NUM_INPUTS=num_inputs, NUM_GROUPS=num_groups,
        GROUP_INPUTS=size, WIDTH=triton.next_power_of_2(size), num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    first = 0
    for part in packed.parts:
        own = slice(first, first + part.num_outputs)
        first += part.num_outputs
        tile = tile_config(part.num_outputs, num_inputs, torch.bfloat16)
        block_rows, of_part = row_block(num_rows), out.view(-1, num_outputs)[:, own]
        _linear[(triton.cdiv(part.num_outputs, tile.block_outputs), triton.cdiv(num_rows, block_rows))](
            q, steps, sums, part.codes, triton_codes.given_or(part.table, part.codes), part.scales,
            triton_codes.given_or(part.minimums, part.scales), q if bias is None else bias[own], of_part, part.low,
            num_rows, part.num_outputs, num_outputs, NUM_GROUPS=num_groups, NUM_BLOCKS=part.codes.shape[0],
            **triton_codes.layout(part), HAS_BIAS=bias is not None, BLOCK_ROWS=block_rows,
            BLOCK_OUTPUTS=tile.block_outputs, num_warps=tile.num_warps, num_stages=triton_codes.num_stages(block_rows),
            enable_fp_fusion=False,
        )  # fmt: skip
    return out
