"""Tiles of the triton linear: functions of the weight's shape, the dtype and the row count.

Only the kind of multiply-add instruction may change a row's bits. An output is one sum over the inputs in ascending
order, 16 at a time for bf16 (m16n8k16 of `mma.sync`, m64nXk16 of `wgmma`), one at a time for fp32; block sizes, warps
and stages do not change that order (tests/kernels/test_linear_triton.py asserts it for all tiles listed here). Triton
uses `wgmma` if outputs are a multiple of 64 and warps of 4 (`uses_wgmma`); a weight keeps one kind at every row count
unless KINDS_AGREE. benchmarks/gpu/linear_tiles.py times CANDIDATES.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# rows; up to 64 are one block and read the weights once. Keep a single size for a device that fails the test of bits
ROW_BLOCKS = (16, 32, 64)
# rows; block sizes above 64 rows; (): ROW_BLOCKS[-1]
MANY_ROW_BLOCKS = (128,)
# whether mma.sync and wgmma give the same bits on the device; if so, narrow weights use wgmma at many rows
KINDS_AGREE = False

# bytes of shared memory per program; two fit on a multiprocessor of compute capability 9.0 (227 KiB)
_SHARED_BYTES = 112 * 1024
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Tile:
    """One program: block_outputs rows of the weight against a block of input rows, block_inputs at a time."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int  # with 16 rows; larger row blocks get what fits into the same shared memory

    @property
    def uses_wgmma(self) -> bool:
        """True if triton compiles a bf16 tile to wgmma on compute capability 9.0."""
        return self.block_outputs % 64 == 0 and self.num_warps % 4 == 0

    def stages(self, block_rows: int, element_bytes: int) -> int:
        """Pipeline stages: num_stages, or what fits. Triton keeps one tile per stage for wgmma, one fewer otherwise."""
        spare = 0 if self.uses_wgmma else 1
        budget = max(_SHARED_BYTES, (self.num_stages - spare) * self._stage_bytes(16, element_bytes))
        return max(2, min(self.num_stages, budget // self._stage_bytes(block_rows, element_bytes) + spare))

    def _stage_bytes(self, block_rows: int, element_bytes: int) -> int:
        return (self.block_outputs + block_rows) * self.block_inputs * element_bytes


# Narrow: at least one program per multiprocessor (132). 4096 outputs: 128 programs of 32; 6144: 192, all resident; 6
# tiles of 8 KiB of weights in flight each.
_TINY = Tile(block_outputs=16, block_inputs=256, num_warps=2, num_stages=6)
_NARROW = Tile(block_outputs=32, block_inputs=128, num_warps=4, num_stages=8)
# Two warps: triton keeps mma.sync.
_NARROW_MANY_ROWS = Tile(block_outputs=64, block_inputs=64, num_warps=2, num_stages=6)
# Wide: 28672 outputs: 224 programs of 128, two per multiprocessor, all resident; 16 KiB of weights per stage.
_WIDE = Tile(block_outputs=128, block_inputs=64, num_warps=4, num_stages=6)
# fp32 runs on CUDA cores: small blocks, so that the unrolled products fit into registers.
_FP32 = Tile(block_outputs=32, block_inputs=32, num_warps=4, num_stages=4)

CANDIDATES = (
    _NARROW,
    Tile(block_outputs=32, block_inputs=256, num_warps=4, num_stages=5),
    _TINY,
    _NARROW_MANY_ROWS,
    Tile(block_outputs=64, block_inputs=128, num_warps=4, num_stages=5),
    Tile(block_outputs=64, block_inputs=256, num_warps=4, num_stages=5),
    _WIDE,
    Tile(block_outputs=128, block_inputs=128, num_warps=8, num_stages=3),
)


def row_block(num_rows: int) -> int:
    """Rows of one program: the smallest block that holds num_rows, else the largest."""
    blocks = ROW_BLOCKS + MANY_ROW_BLOCKS
    return next((block for block in blocks if num_rows <= block), blocks[-1])


def tile_config(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_rows: int = 1) -> Tile:
    """The tile of a weight [num_outputs, num_inputs] for num_rows rows; the bits are the same for every num_rows.

    num_inputs is unused: all tiles share that loop.
    """
    if dtype == torch.float32:
        return _FP32
    if num_outputs > 8192:
        return _WIDE
    large_programs = -(-num_outputs // 128) * (num_rows // 128)
    if large_programs >= _MULTIPROCESSORS:
        return _WIDE if KINDS_AGREE else _NARROW_MANY_ROWS
    return _NARROW if num_outputs > 2048 else _TINY
