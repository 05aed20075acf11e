"""A linear layer for bf16 on CPUs with AVX512-BF16: weights in panels of 12 bits each, and every row has the same bits
whatever the number of rows and its place among them.

A row's products are added up in one order only. With AMX that of its instruction (cpu_panel_amx); else blocks of
inputs, each one pair after another, then the blocks' sums. That needs no prepacked copy by a library whose order is
unknown; the latter happens to be the order of oneDNN's bf16 matmul of several rows without AMX, as far as was tried
(tests/kernels/test_panels.py), so that machines of either kind of kernel agree.

Measured without AMX on two cores of an AMD EPYC, 16 matrices of 4096 x 1024 out of cache, against oneDNN in the same
run: 0.54 of its time at 1 row, 0.60 at 4, 0.65 at 6, 0.78 at 12, 0.85 at 24, 1.0 from 48 on; plain panels 0.67, 0.73,
0.74.

Needs numba.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from llvmlite import binding
from torch.nn.functional import pad

from kernels import cpu_team, record, simd
from kernels.errors import KernelArgumentError
from kernels.linear import cpu_panel_amx as amx
from kernels.linear import cpu_panel_coding as coding
from kernels.linear import cpu_panel_tiles as tiles

# Below this number of weights a second thread costs more than it brings.
_MIN_PARALLEL_WEIGHTS = 400_000
# Smaller ones tend to stay in the cache, where decoding is all cost: 1024 x 1024 there takes 40 us plain and 43 coded
# at 1 row, 51 and 64 at 6.
MIN_CODED_WEIGHTS = 1_000_000
# Where more of the weights need patches, they are kept as they are: trained ones need 1 in 10,000.
_MOST_PATCHES = 1 / 64
# x86-64 Linux: asm/unistd_64.h, asm/prctl.h, and the number of the tiles' state.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Panels:
    """A weight as `pack` laid it out, see cpu_panel_coding."""

    num_outputs: int
    num_inputs: int
    panels: torch.Tensor  # [num_panels, num_lines, ...]: uint8 [192] if coded, else bf16 [64, 2]
    tables: torch.Tensor | None = None  # uint8 [num_panels, 16]; None: plain
    patches: torch.Tensor | None = None  # uint32, of all panels
    patch_ends: torch.Tensor | None = None  # int32 [1 + num_panels * chunks of a panel], the first one 0
    amx: bool = False  # whether they are multiplied by AMX, whose order of summation is another

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        parts = (self.panels, self.tables, self.patches, self.patch_ends)
        return sum(part.nbytes for part in parts if part is not None)


@functools.cache
def _has_instruction() -> bool:
    return bool(binding.get_host_cpu_features().get("avx512bf16", False))


@functools.cache
def has_amx() -> bool:
    """Whether this machine has AMX for bf16 and the kernel lets this process use it."""
    features = binding.get_host_cpu_features()
    if sys.platform != "linux" or not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    # Tiles are state that Linux saves only for processes that have asked for it; threads to come inherit it.
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)) == 0


def supports(dtype: torch.dtype) -> bool:
    """Whether weights of this dtype can be packed, on this machine."""
    return dtype == torch.bfloat16 and _has_instruction()


def pack(weight: torch.Tensor, *, coded: bool | None = None, use_amx: bool | None = None) -> Panels:
    """A copy of weight bf16 [N, K] in panels; coded: None for "where it is large enough and pays"; use_amx: None for
    "where it can be".
    """
    num_outputs, num_inputs = weight.shape
    num_panels = -(-num_outputs // coding.PANEL_COLUMNS)
    plain = weight.new_zeros((num_panels, -(-num_inputs // 2), coding.PANEL_COLUMNS, 2))
    pairs = pad(weight, (0, 1)) if num_inputs % 2 else weight
    whole = num_outputs // coding.PANEL_COLUMNS * coding.PANEL_COLUMNS
    if whole:
        plain[: whole // coding.PANEL_COLUMNS] = _lines(pairs[:whole])
    if whole < num_outputs:
        plain[-1, :, : num_outputs - whole] = _lines(pairs[whole:])[0]
    if use_amx is None:
        use_amx = num_inputs % amx.TILE_INPUTS == 0 and has_amx()
    as_it_is = Panels(num_outputs, num_inputs, plain, amx=use_amx)
    if coded is None:
        coded = weight.numel() >= MIN_CODED_WEIGHTS
    return (_code(as_it_is) if coded else None) or as_it_is


def _lines(weight: torch.Tensor) -> torch.Tensor:
    """[panels, lines, columns, 2] of whole panels, or of one that has fewer columns."""
    columns = min(coding.PANEL_COLUMNS, weight.shape[0])
    return weight.reshape(-1, columns, weight.shape[1] // 2, 2).transpose(1, 2)


def _code(plain: Panels) -> Panels | None:
    """The panels, coded; None where too many weights need patches."""
    num_panels, num_lines = plain.panels.shape[:2]
    chunks_of_panel = -(-num_lines // coding.CHUNK_LINES)
    tables = torch.zeros((num_panels, coding.TABLE_BYTES), dtype=torch.uint8)
    num_patches = torch.zeros(num_panels * chunks_of_panel, dtype=torch.int32)
    call = coding.EncodeRecord(
        plain=plain.panels.data_ptr(), num_panels=num_panels, num_lines=num_lines, tables=tables.data_ptr(),
        num_patches=num_patches.data_ptr(),
    )  # fmt: skip
    work = cpu_team.Work(_entry(_make_encode), call, (), (), num_panels, torch.get_num_threads())
    cpu_team.run(work)
    total = int(num_patches.sum(dtype=torch.int64))
    if total > _MOST_PATCHES * plain.num_outputs * plain.num_inputs:
        return None
    ends = torch.zeros(1 + num_patches.numel(), dtype=torch.int32)
    ends[1:] = num_patches.cumsum(0)
    patches = torch.zeros(total, dtype=torch.uint32)
    coded = torch.empty((num_panels, num_lines, coding.CODED_LINE_BYTES), dtype=torch.uint8)
    call.patch_starts, call.patches, call.coded = ends.data_ptr(), patches.data_ptr(), coded.data_ptr()
    cpu_team.run(work)
    return Panels(plain.num_outputs, plain.num_inputs, coded, tables, patches, ends, plain.amx)


def linear(x: torch.Tensor, packed: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [..., K], packed from pack(weight [N, K]), bias bf16 [N], contiguous, or None; returns bf16 [..., N].

    Raises KernelArgumentError for another width or dtype.
    """
    num_outputs, num_inputs = packed.num_outputs, packed.num_inputs
    if x.dtype != torch.bfloat16 or x.shape[-1] != num_inputs:
        expected = f"bfloat16 [..., {num_inputs}]"
        raise KernelArgumentError(f"x is {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, expected {expected}")
    out = x.new_empty((*x.shape[:-1], num_outputs))
    num_rows = x.numel() // num_inputs
    if out.numel() == 0:
        return out
    if num_inputs % 2:
        x, num_inputs = pad(x, (0, 1)), num_inputs + 1
    x = x.contiguous()
    threads = 1 if num_outputs * num_inputs < _MIN_PARALLEL_WEIGHTS else torch.get_num_threads()
    panels = packed.panels
    call = tiles.CallRecord(
        x.data_ptr(), 2 * num_inputs, panels.data_ptr(), panels[0].nbytes, *_coding_of(packed),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), 2 * num_outputs, num_rows, num_outputs, num_inputs,
        block_of(num_inputs),
        cpu_team.scratch(amx.SCRATCH_BYTES if packed.amx else tiles.SCRATCH_BYTES, threads),
    )  # fmt: skip
    entry = _entry(_make_run_amx if packed.amx else _make_run)
    cpu_team.run(cpu_team.Work(entry, call, (out,), (x,), len(panels), threads))
    return out


def _coding_of(packed: Panels) -> tuple[int, int, int]:
    """Addresses of tables, patches and the ends of the patches of each chunk; zeros for plain panels."""
    if packed.tables is None or packed.patches is None or packed.patch_ends is None:
        return 0, 0, 0
    return packed.tables.data_ptr(), packed.patches.data_ptr(), packed.patch_ends[1:].data_ptr()


def block_of(num_inputs: int) -> int:
    """So many inputs are summed up before their sum joins that of the inputs before them."""
    if num_inputs <= 512:
        return num_inputs
    return 512 if num_inputs <= 1024 else 1024


def _make_run(digest: int) -> Callable[[Any, int, int], None]:
    def entry(address, unit, thread):  # type: ignore[no-untyped-def]
        if digest >= 0:
            tiles.run_panel(address, unit, thread)

    return entry


def _make_run_amx(digest: int) -> Callable[[Any, int, int], None]:
    def entry(address, unit, thread):  # type: ignore[no-untyped-def]
        if digest >= 0:
            amx.run_panel(address, unit, thread)

    return entry


def _make_encode(digest: int) -> Callable[[Any, int, int], None]:
    def entry(address, unit, _thread):  # type: ignore[no-untyped-def]
        if digest >= 0:
            coding.encode_panel(address, unit)

    return entry


@functools.cache
def _entry(make_entry: Callable[[int], Callable[[Any, int, int], None]]) -> int:
    return cpu_team.compile_unit(make_entry, (record, simd, coding, tiles, amx))
