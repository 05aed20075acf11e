"""Reads GGUF's blocks as codes: per type, where a block keeps its numbers, scales and minimums.

The layouts are those of ggml-common.h; the blocks of a row are its inputs in order. Not here: types without codes
(Q2_K, Q3_K, IQ1 to IQ3), which gguf-py dequantises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.engine.model.quantised.unpack import e8m0
from outrider.kernels.linear.codes import CodedFactors, Codes

# Scales or minimums, float32 [N, blocks, of a block]; or their int8 codes with a float16 step [N, blocks, 1].
Factors = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
# A weight's parts: numbers int8 [N, blocks, of a block], scales, minimums or None.
Parts = tuple[torch.Tensor, Factors, Factors | None]
# bytes; unpacked per step; bounds memory, as unpacking takes several times this
_SLAB_BYTES = 2_000_000
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# twice e2m1's values
_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the float16 at a byte of each block, widened, [N, blocks, 1]."""
    return _step(blocks, at).float()


def _step(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Returns the float16 at a byte of each block, [N, blocks, 1]."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Returns the low nibbles of all bytes, then the high ones."""
    return torch.cat((data & 15, data >> 4), -1)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Returns the bits of all bytes, lowest first."""
    bits: torch.Tensor = data[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(-2)


def _looked_up(table: tuple[int, ...], nibbles: torch.Tensor) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int8)[nibbles.int()]


def _split(data: torch.Tensor, *sizes: int) -> torch.Tensor:
    """Splits the last dimension into several."""
    return data.reshape(*data.shape[:-1], *sizes)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[..., 2:].view(torch.int8), _half(blocks, 0), None


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 2:]).to(torch.int8) - 8, _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[..., 4:]).to(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[..., 6:]) | _bits(blocks[..., 2:6]) << 4
    return numbers.to(torch.int8) - 16, _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    numbers = _nibbles(blocks[..., 8:]) | _bits(blocks[..., 4:8]) << 4
    return numbers.to(torch.int8), _half(blocks, 0), _half(blocks, 2)


def _iq4_nl(blocks: torch.Tensor) -> Parts:
    return _looked_up(_IQ4, _nibbles(blocks[..., 2:])), _half(blocks, 0), None


def _mxfp4(blocks: torch.Tensor) -> Parts:
    return _looked_up(_E2M1, _nibbles(blocks[..., 1:])), e8m0(blocks[..., :1].contiguous()) / 2, None


def _q4_k(blocks: torch.Tensor) -> Parts:
    return (_k_nibbles(blocks[..., 16:]).to(torch.int8), *_k_scales(blocks))


def _q5_k(blocks: torch.Tensor) -> Parts:
    tops = blocks[..., None, 16:48] >> torch.arange(8, dtype=torch.uint8)[:, None] & 1
    numbers = _k_nibbles(blocks[..., 48:]) | tops.flatten(-2) << 4
    return (numbers.to(torch.int8), *_k_scales(blocks))


def _k_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Unpacks the nibbles of K types: of each 32 bytes, the low nibbles are one group of 32, the high ones the next."""
    return _nibbles(_split(data, 4, 32)).flatten(-2)


def _k_scales(blocks: torch.Tensor) -> tuple[Factors, Factors]:
    """Returns the scales and minimums of the eight groups: 6 bits each, times the block's two float16."""
    first, second, third = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minimums = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return (scales.to(torch.int8), _step(blocks, 0)), (minimums.to(torch.int8), -_step(blocks, 2))


def _q6_k(blocks: torch.Tensor) -> Parts:
    """Unpacks Q6_K: each half block has 64 bytes of low nibbles, 32 of two upper bits, four groups of 32 numbers."""
    lows = _nibbles(_split(blocks[..., :128], 2, 64))
    tops = _split(blocks[..., 128:192], 2, 1, 32) >> torch.tensor([[0], [2], [4], [6]], dtype=torch.uint8) & 3
    numbers = (lows | tops.flatten(-2) << 4).to(torch.int8) - 32
    return numbers.flatten(-2), (blocks[..., 192:208].view(torch.int8), _step(blocks, 208)), None


def _iq4_xs(blocks: torch.Tensor) -> Parts:
    nibbles = _nibbles(_split(blocks[..., 8:], 8, 16)).flatten(-2)
    lows = torch.stack((blocks[..., 4:8] & 15, blocks[..., 4:8] >> 4), -1).flatten(-2)
    tops = blocks[..., 2:4, None] >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8) & 3
    scales = (lows | tops.flatten(-2) << 4).to(torch.int8) - 32
    return _looked_up(_IQ4, nibbles), (scales, _step(blocks, 0)), None


_TYPES: dict[str, Callable[[torch.Tensor], Parts]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
}


def has_codes(type_name: str) -> bool:
    """Returns whether weights of this type can be read as codes. type_name: of gguf.GGMLQuantizationType."""
    return type_name in _TYPES


def codes_of(rows: torch.Tensor, type_name: str, block_bytes: int) -> Codes:
    """Reads the codes of rows, uint8 [N, bytes of a row]. Raises KeyError unless the type has codes."""
    slabs = [
        _TYPES[type_name](_split(slab, -1, block_bytes))
        for slab in torch.tensor_split(rows, -(-rows.numel() // _SLAB_BYTES))
    ]
    all_numbers, all_scales, all_minimums = zip(*slabs, strict=True)
    numbers = torch.cat([part.flatten(1) for part in all_numbers])
    scales, coded_scales = _factors(all_scales)
    minimums, coded_minimums = (None, None) if all_minimums[0] is None else _factors(all_minimums)
    groups = torch.arange(numbers.shape[1]) // (numbers.shape[1] // scales.shape[1])
    return Codes(numbers, scales, groups, None, minimums, coded_scales, coded_minimums)


def _factors(slabs: Sequence[Factors]) -> tuple[torch.Tensor, CodedFactors | None]:
    """Returns (values, codes) [N, of a row]; codes are None where the type has none."""
    if isinstance(slabs[0], torch.Tensor):
        return torch.cat([slab.flatten(1) for slab in slabs if isinstance(slab, torch.Tensor)]), None
    codes, steps = (torch.cat([part.flatten(1) for part in parts]) for parts in zip(*slabs, strict=True))
    coded = CodedFactors(codes, steps)
    return coded.values(), coded
