"""A linear layer for few bf16 rows on CPU that reads oneDNN's packed weights and gives oneDNN's bits.

A step of few rows waits for the weights to come from memory, and oneDNN asks for them at 19-26 GB/s where the machine
gives 33-35. This kernel is one stream over the packed weights that `cpu.pack` made, read in place: no second copy.

Why the same bits: oneDNN's bf16 matmul, for more than one row, adds up the products of a block of inputs one pair after
another (`vdpbf16ps`: the odd element first) and then the blocks' sums. Found by trying on an AVX512-BF16 machine: one
block up to 512 inputs or so, blocks of 512 up to 1024 inputs, of 1024 beyond. Nothing of this is documented, so nothing
of it is taken for granted: `probe` compares the layout and the bits for every shape of weights, on data whose sums
cancel, and answers None where they do not agree. Then oneDNN computes all.

Needs numba.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from llvmlite import binding

from kernels import cpu_team, simd
from kernels.linear import cpu, cpu_few_rows_tiles
from kernels.linear.cpu_few_rows_tiles import PAIR_BYTES, PANEL_COLUMNS, TOTAL_BYTES, run_panels

# As fast as oneDNN or faster up to 48 rows (one thread, weights in the cache: 219 and 209 GFLOP/s there). Up to 64, not
# timed, for memory's sake: oneDNN keeps a program for every row count.
MAX_ROWS = 64
# Below this number of weights a second thread costs more than it brings.
MIN_PARALLEL_WEIGHTS = 400_000
_BLOCKS_OF_INPUTS = (1 << 30, 512, 1024, 256, 2048, 768, 384, 128, 4096)
_Fields = ctypes.c_int64 * len(cpu_few_rows_tiles.CallFields._fields)
_Counters = ctypes.c_int64 * 2


@dataclass(frozen=True)
class FewRows:
    """How the packed weights of one linear are to be read."""

    address: int
    num_outputs: int
    num_inputs: int
    panel_bytes: int
    block_inputs: int


def _make_entry(digest: int) -> Callable[[Any], None]:
    def entry(address):  # type: ignore[no-untyped-def]
        if digest >= 0:
            run_panels(address)

    return entry


@functools.cache
def _entry() -> int:
    return cpu_team.compile_entry(_make_entry, (simd, cpu_few_rows_tiles))


def plan(packed: torch.Tensor, num_outputs: int, num_inputs: int, dtype: torch.dtype) -> FewRows | None:
    """How to read packed = cpu.pack(weight [num_outputs, num_inputs]), or None where oneDNN has to compute all.

    The result holds the address of packed, which the caller keeps alive.
    """
    block_inputs = probe(num_outputs, num_inputs, dtype, torch.get_num_threads())
    return None if block_inputs is None else _describe(packed, num_outputs, num_inputs, block_inputs)


def linear(x: torch.Tensor, plan: FewRows, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [..., K], contiguous, of 1 to MAX_ROWS rows; bias bf16 [N], contiguous, or None; returns [..., N]."""
    num_outputs, num_inputs = plan.num_outputs, plan.num_inputs
    out = x.new_empty((*x.shape[:-1], num_outputs))
    num_rows = x.numel() // num_inputs
    num_panels = -(-num_outputs // PANEL_COLUMNS)
    threads = 1 if num_outputs * num_inputs < MIN_PARALLEL_WEIGHTS else torch.get_num_threads()
    scratch_stride = MAX_ROWS * TOTAL_BYTES
    scratch = cpu_team.scratch(scratch_stride * threads)
    counters = _Counters()
    fields = _Fields(
        x.data_ptr(), 2 * num_inputs, plan.address, plan.panel_bytes, 0 if bias is None else bias.data_ptr(),
        out.data_ptr(), 2 * num_outputs, num_rows, num_outputs, num_inputs, plan.block_inputs, num_panels,
        ctypes.addressof(counters), scratch, scratch_stride,
    )  # fmt: skip
    cpu_team.run(cpu_team.Work(_entry(), fields, threads, counters=counters))
    return out


@functools.lru_cache(maxsize=256)
def probe(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_threads: int) -> int | None:
    """The block of inputs with which our bits are oneDNN's for weights of this shape; None where there is none.

    num_threads is torch's own: oneDNN may cut its work by it.
    """
    has_instruction = binding.get_host_cpu_features().get("avx512bf16", False)
    has_address = hasattr(torch.ops.mkldnn, "data_ptr") and hasattr(torch.ops.mkldnn, "_nbytes")
    if dtype != torch.bfloat16 or not (has_instruction and has_address):
        return None
    if num_inputs % 2 or num_outputs % simd.LANES:
        return None
    x, weight, bias = _cancelling(num_outputs, num_inputs)
    packed = cpu.pack(weight)
    if not _is_laid_out_in_panels(packed, weight):
        return None
    expected = cpu.linear(x, packed), cpu.linear(x, packed, bias)
    many = cpu.linear(x.repeat(8, 1), packed).view(8, *expected[0].shape)
    if not torch.equal(many, expected[0].expand_as(many)):
        return None
    for block_inputs in _BLOCKS_OF_INPUTS:
        described = _describe(packed, num_outputs, num_inputs, block_inputs)
        found = linear(x, described), linear(x, described, bias)
        if all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True)):
            return block_inputs
    return None


def _cancelling(num_outputs: int, num_inputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [16, K], weight [N, K] and bias whose products cancel in half of the rows: what is left is rounding noise
    of the order of summation, which shows any other order in nearly every output."""
    generator = torch.Generator().manual_seed(num_outputs * 1_000_003 + num_inputs)
    half = num_inputs // 2
    weight = torch.randn(num_outputs, num_inputs, generator=generator).bfloat16()
    weight[:, half : 2 * half] = weight[:, :half]
    x = torch.randn(MAX_ROWS, num_inputs, generator=generator).bfloat16()
    x[::2, half : 2 * half] = -x[::2, :half]
    return x, weight, (torch.randn(num_outputs, generator=generator) / 1000).bfloat16()


def _describe(packed: torch.Tensor, num_outputs: int, num_inputs: int, block_inputs: int) -> FewRows:
    address: int = torch.ops.mkldnn.data_ptr(packed)
    num_panels = -(-num_outputs // PANEL_COLUMNS)
    return FewRows(address, num_outputs, num_inputs, torch.ops.mkldnn._nbytes(packed) // num_panels, block_inputs)


def _is_laid_out_in_panels(packed: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the packed bytes are the panels that `cpu_few_rows_tiles` reads."""
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // PANEL_COLUMNS)
    num_bytes: int = torch.ops.mkldnn._nbytes(packed)
    if num_bytes % (num_panels * PAIR_BYTES) or num_bytes < num_panels * num_inputs // 2 * PAIR_BYTES:
        return False
    stored = (ctypes.c_int16 * (num_bytes // 2)).from_address(torch.ops.mkldnn.data_ptr(packed))
    panels = np.ctypeslib.as_array(stored).reshape(num_panels, -1, PANEL_COLUMNS, 2)
    columns = panels.transpose(0, 2, 1, 3).reshape(num_panels * PANEL_COLUMNS, -1)
    bits = weight.contiguous().view(torch.int16).numpy()
    return bool(np.array_equal(columns[:num_outputs, :num_inputs], bits))
