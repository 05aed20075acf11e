"""How the triton linear is cut into tiles: plain functions of the weight's shape, the dtype and the row count.

Which of these numbers may move the bits of a row? Only the kind of the multiply-add instruction. An output is one sum
over the inputs in ascending order, 16 at a time for bf16 (m16n8k16 of `mma.sync`, m64nXk16 of `wgmma`) and one at a
time for fp32; blocks of rows, of outputs and of inputs, warps and stages decide who computes it and when, not in which
order. tests/kernels/test_linear_triton.py asserts that on the device for all that is listed here, and
benchmarks/linear_tiles.py times CANDIDATES there. Triton takes `wgmma` where outputs come in 64s
and warps in fours (`uses_wgmma`); a weight keeps to one kind at every row count unless KINDS_AGREE.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

# Up to 64 rows are one block, so that the weights come from memory once. Fewer columns of the multiply-add are idle in
# a smaller block, and more stages fit. A device that fails the test of equal bits gets a single one here.
ROW_BLOCKS = (16, 32, 64)
# For more than 64 rows; () makes those blocks of ROW_BLOCKS[-1].
MANY_ROW_BLOCKS = (128,)
# Whether mma.sync and wgmma give the same bits, which the device has to say. If they do, narrow weights change to wgmma
# where many rows make the work heavy.
KINDS_AGREE = False

# Two programs of this size are resident on a multiprocessor of a GPU of compute capability 9.0 (227 KiB).
_SHARED_BYTES = 112 * 1024
_MULTIPROCESSORS = 132


@dataclass(frozen=True)
class Tile:
    """One program: block_outputs rows of the weight against a block of input rows, block_inputs at a time."""

    block_outputs: int
    block_inputs: int
    num_warps: int
    num_stages: int  # with 16 rows; larger blocks of rows get what fits into the same shared memory

    @property
    def uses_wgmma(self) -> bool:
        """Whether triton compiles a bf16 tile to wgmma on compute capability 9.0."""
        return self.block_outputs % 64 == 0 and self.num_warps % 4 == 0

    def stages(self, block_rows: int, element_bytes: int) -> int:
        """Stages of the pipeline that loads the inputs: num_stages, or what fits.

        Triton keeps a tile per stage in shared memory for wgmma, which reads it from there, and one fewer otherwise.
        """
        spare = 0 if self.uses_wgmma else 1
        budget = max(_SHARED_BYTES, (self.num_stages - spare) * self._stage_bytes(16, element_bytes))
        return max(2, min(self.num_stages, budget // self._stage_bytes(block_rows, element_bytes) + spare))

    def _stage_bytes(self, block_rows: int, element_bytes: int) -> int:
        return (self.block_outputs + block_rows) * self.block_inputs * element_bytes


# Narrow: 132 multiprocessors want as many programs. 4096 outputs are 128 programs of 32, and with 6144 every one of
# 192 is resident; 6 tiles of 8 KiB of weights are on their way to each.
_TINY = Tile(block_outputs=16, block_inputs=256, num_warps=2, num_stages=6)
_NARROW = Tile(block_outputs=32, block_inputs=128, num_warps=4, num_stages=8)
# Two warps, so that triton stays with mma.sync.
_NARROW_MANY_ROWS = Tile(block_outputs=64, block_inputs=64, num_warps=2, num_stages=6)
# Wide: 28672 outputs are 224 programs of 128, two to a multiprocessor and so all resident; 16 KiB of weights a stage.
# The inputs come from the L2 cache once for 128 outputs.
_WIDE = Tile(block_outputs=128, block_inputs=64, num_warps=4, num_stages=6)
# fp32 runs on the CUDA cores: small blocks, so that the unrolled products fit into registers.
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
    """Rows of one program: the least block that holds num_rows, or the largest there is."""
    blocks = ROW_BLOCKS + MANY_ROW_BLOCKS
    return next((block for block in blocks if num_rows <= block), blocks[-1])


def tile_config(num_outputs: int, num_inputs: int, dtype: torch.dtype, num_rows: int = 1) -> Tile:
    """The tile of a weight [num_outputs, num_inputs] that meets num_rows rows; of the same bits for every num_rows.

    num_inputs decides nothing today: it is the length of the loop, which all tiles share.
    """
    if dtype == torch.float32:
        return _FP32
    if num_outputs > 8192:
        return _WIDE
    large_programs = -(-num_outputs // 128) * (num_rows // 128)
    if large_programs >= _MULTIPROCESSORS:
        return _WIDE if KINDS_AGREE else _NARROW_MANY_ROWS
    return _NARROW if num_outputs > 2048 else _TINY
