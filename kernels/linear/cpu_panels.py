"""Row-invariant bf16 linears for CPUs with AVX512-BF16 or AVX2 alone: weights in panels, large ones in 12 bits.

Order of a row's sums: with AMX, that of its instruction (cpu_panel_amx); else blocks of inputs, pair by pair, then the
blocks' sums. Without AMX this equals oneDNN's order for several rows, as far as tried (tests/kernels/test_panels.py).

Time relative to oneDNN in the same run (2 cores of an AMD EPYC without AMX, 16 matrices of 4096 x 1024 out of cache):
    rows     1     4     6     12    24    48 and more
    12 bits  0.54  0.60  0.65  0.78  0.85  1.0
    plain    0.67  0.73  0.74
With AVX2 alone oneDNN packs no bf16, and torch's own product of eight padded rows takes 6 to 10 times as long for up
to 64 rows (Zen 3, one core, 1536 x 576).
Needs numba.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from dataclasses import dataclass

import torch
from llvmlite import binding
from torch.nn.functional import pad

from outrider.kernels.cpu import team as cpu_team
from outrider.kernels.cpu.emitters import multiplies_pairs
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.linear import cpu_panel_amx as amx
from outrider.kernels.linear import cpu_panel_coding as coding
from outrider.kernels.linear import cpu_panel_tiles as tiles

# weights, and weights x rows; calls below both run on one thread: 30 us at most, a few times what waking another costs
_MIN_PARALLEL_WEIGHTS = 400_000
_MIN_PARALLEL_PRODUCTS = 2_000_000
# weights; smaller matrices stay plain: in cache, decoding only costs (1024 x 1024: 40 -> 43 us at 1 row, 51 -> 64 at 6)
MIN_CODED_WEIGHTS = 1_000_000
# patches per weight; matrices above it stay plain. Trained weights need about 1 in 10,000
_MAX_PATCH_RATIO = 1 / 64
# x86-64 Linux: asm/unistd_64.h, asm/prctl.h, and the state component of tile data
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


@dataclass(frozen=True)
class Panels:
    """A packed weight; layout in cpu_panel_coding."""

    num_outputs: int
    num_inputs: int
    panels: torch.Tensor  # [num_panels, num_lines, ...]: uint8 [192] if coded, else bf16 [64, 2]
    tables: torch.Tensor | None = None  # uint8 [num_panels, 16]; None: plain
    patches: torch.Tensor | None = None  # uint32, of all panels
    patch_ends: torch.Tensor | None = None  # int32 [1 + num_panels * chunks of a panel], the first one 0
    amx: bool = False  # multiplied by AMX, which sums in another order

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        parts = (self.panels, self.tables, self.patches, self.patch_ends)
        return sum(part.nbytes for part in parts if part is not None)


@functools.cache
def has_amx() -> bool:
    """Returns whether the CPU has AMX for bf16 and Linux grants it to this process."""
    features = binding.get_host_cpu_features()
    if sys.platform != "linux" or not (features.get("amx-tile") and features.get("amx-bf16")):
        return False
    # Tile state has to be requested per process; later threads inherit the permission.
    return int(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA)) == 0


def supports(dtype: torch.dtype) -> bool:
    """Returns whether weights of this dtype can be packed on this machine."""
    return dtype == torch.bfloat16 and multiplies_pairs()


def pack(weight: torch.Tensor, *, coded: bool | None = None, use_amx: bool | None = None) -> Panels:
    """A copy of weight bf16 [N, K] in panels. coded: None decides by size and patches; use_amx: None: if available."""
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
    uncoded = Panels(num_outputs, num_inputs, plain, amx=use_amx)
    if coded is None:
        coded = weight.numel() >= MIN_CODED_WEIGHTS
    return (_code(uncoded) if coded else None) or uncoded


def _lines(weight: torch.Tensor) -> torch.Tensor:
    """[panels, lines, columns, 2] of whole panels, or of one narrower panel."""
    columns = min(coding.PANEL_COLUMNS, weight.shape[0])
    return weight.reshape(-1, columns, weight.shape[1] // 2, 2).transpose(1, 2)


def _code(plain: Panels) -> Panels | None:
    """The panels in 12 bits; None if too many weights need patches."""
    num_panels, num_lines = plain.panels.shape[:2]
    chunks_of_panel = -(-num_lines // coding.CHUNK_LINES)
    tables = torch.zeros((num_panels, coding.TABLE_BYTES), dtype=torch.uint8)
    num_patches = torch.zeros(num_panels * chunks_of_panel, dtype=torch.int32)
    call = coding.EncodeRecord(
        plain=plain.panels.data_ptr(), num_panels=num_panels, num_lines=num_lines, tables=tables.data_ptr(),
        num_patches=num_patches.data_ptr(),
    )  # fmt: skip
    work = cpu_team.Work(coding.encode_panel, call, (), (), num_panels, torch.get_num_threads())
    cpu_team.run(work)
    total = int(num_patches.sum(dtype=torch.int64))
    if total > _MAX_PATCH_RATIO * plain.num_outputs * plain.num_inputs:
        return None
    ends = torch.zeros(1 + num_patches.numel(), dtype=torch.int32)
    ends[1:] = num_patches.cumsum(0)
    patches = torch.zeros(total, dtype=torch.uint32)
    coded = torch.empty((num_panels, num_lines, coding.CODED_LINE_BYTES), dtype=torch.uint8)
    call.patch_starts, call.patches, call.coded = ends.data_ptr(), patches.data_ptr(), coded.data_ptr()
    cpu_team.run(work)
    return Panels(plain.num_outputs, plain.num_inputs, coded, tables, patches, ends, plain.amx)


def num_threads(num_weights: int, num_rows: int) -> int:
    """Threads worth waking for one call."""
    is_small = num_weights < _MIN_PARALLEL_WEIGHTS and num_weights * num_rows < _MIN_PARALLEL_PRODUCTS
    return 1 if is_small else torch.get_num_threads()


def empty_output(x: torch.Tensor, num_outputs: int, num_inputs: int) -> torch.Tensor:
    """bf16 [..., N] for x bf16 [..., K]. Raises KernelArgumentError for another width or dtype."""
    if x.dtype != torch.bfloat16 or x.shape[-1] != num_inputs:
        expected = f"bfloat16 [..., {num_inputs}]"
        raise KernelArgumentError(f"x is {str(x.dtype).removeprefix('torch.')} {list(x.shape)}, expected {expected}")
    return x.new_empty((*x.shape[:-1], num_outputs))


def linear(x: torch.Tensor, packed: Panels, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x bf16 [..., K], packed from pack(weight [N, K]), bias bf16 [N], contiguous, or None; returns bf16 [..., N].

    Raises KernelArgumentError for another width or dtype.
    """
    num_outputs, num_inputs = packed.num_outputs, packed.num_inputs
    out = empty_output(x, num_outputs, num_inputs)
    num_rows = x.numel() // num_inputs
    if out.numel() == 0:
        return out
    if num_inputs % 2:
        x, num_inputs = pad(x, (0, 1)), num_inputs + 1
    x = x.contiguous()
    threads = num_threads(num_outputs * num_inputs, num_rows)
    panels = packed.panels
    call = tiles.CallRecord(
        x.data_ptr(), 2 * num_inputs, panels.data_ptr(), panels[0].nbytes, *_coding_of(packed),
        0 if bias is None else bias.data_ptr(), out.data_ptr(), 2 * num_outputs, num_rows, num_outputs, num_inputs,
        block_of(num_inputs),
        cpu_team.scratch(amx.SCRATCH_BYTES if packed.amx else tiles.SCRATCH_BYTES, threads),
    )  # fmt: skip
    entry = amx.run_panel if packed.amx else tiles.run_panel
    cpu_team.run(cpu_team.Work(entry, call, (out,), (x,), len(panels), threads))
    return out


def _coding_of(packed: Panels) -> tuple[int, int, int]:
    """Addresses of tables, patches and patch ends; zeros for plain panels."""
    if packed.tables is None or packed.patches is None or packed.patch_ends is None:
        return 0, 0, 0
    return packed.tables.data_ptr(), packed.patches.data_ptr(), packed.patch_ends[1:].data_ptr()


def block_of(num_inputs: int) -> int:
    """Inputs per partial sum; partial sums are added in order (without AMX)."""
    if num_inputs <= 512:
        return num_inputs
    return 512 if num_inputs <= 1024 else 1024
