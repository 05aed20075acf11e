"""Blocks of each ggml type, random bytes with small scales, against plain transcriptions of their description.

(ggml/src/ggml-common.h and the comments there; docs of the formats.) Weight by weight, in float64, by hand.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import gguf
import numpy as np
import pytest
import torch

from outrider.engine.model.gguf.codes import codes_of
from outrider.engine.model.gguf.tensors import dequantised

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
Block = bytes


def half(block: Block, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def halves(data: Block) -> list[int]:
    """The low nibbles of all bytes, then the high ones."""
    return [byte & 15 for byte in data] + [byte >> 4 for byte in data]


def q8_0(block: Block) -> list[float]:
    return [half(block, 0) * signed(byte) for byte in block[2:34]]


def q4_0(block: Block) -> list[float]:
    return [half(block, 0) * (code - 8) for code in halves(block[2:18])]


def q4_1(block: Block) -> list[float]:
    return [half(block, 0) * code + half(block, 2) for code in halves(block[4:20])]


def fifth_bits(block: Block, at: int) -> list[int]:
    bits = struct.unpack_from("<I", block, at)[0]
    return [bits >> place & 1 for place in range(32)]


def q5_0(block: Block) -> list[float]:
    codes = zip(halves(block[6:22]), fifth_bits(block, 2), strict=True)
    return [half(block, 0) * (low + 16 * top - 16) for low, top in codes]


def q5_1(block: Block) -> list[float]:
    codes = zip(halves(block[8:24]), fifth_bits(block, 4), strict=True)
    return [half(block, 0) * (low + 16 * top) + half(block, 2) for low, top in codes]


def iq4_nl(block: Block) -> list[float]:
    return [half(block, 0) * _IQ4[code] for code in halves(block[2:18])]


def mxfp4(block: Block) -> list[float]:
    return [2.0 ** (block[0] - 127) * _E2M1[code] for code in halves(block[1:17])]


def six_bit_scales(scales: Block) -> list[tuple[int, int]]:
    """(scale, minimum) of each of the eight sub-blocks."""
    found = [(scales[j] & 63, scales[j + 4] & 63) for j in range(4)]
    for j in range(4, 8):
        low = scales[j + 4]
        found.append(((low & 15) | (scales[j - 4] >> 6) << 4, (low >> 4) | (scales[j] >> 6) << 4))
    return found


def k_codes(data: Block) -> list[int]:
    """Chunks of 32 bytes: the low nibbles are one sub-block of 32, the high ones the next."""
    return [code for at in range(0, 128, 32) for code in halves(data[at : at + 32])]


def q4_k(block: Block) -> list[float]:
    scales = six_bit_scales(block[4:16])
    pairs = [(code, *scales[place // 32]) for place, code in enumerate(k_codes(block[16:144]))]
    return [half(block, 0) * scale * code - half(block, 2) * minimum for code, scale, minimum in pairs]


def q5_k(block: Block) -> list[float]:
    scales, tops = six_bit_scales(block[4:16]), block[16:48]
    weights = []
    for place, code in enumerate(k_codes(block[48:176])):
        part = place // 32
        code += 16 * (tops[place % 32] >> part & 1)
        weights.append(half(block, 0) * scales[part][0] * code - half(block, 2) * scales[part][1])
    return weights


def q6_k(block: Block) -> list[float]:
    weights = []
    for place in range(256):
        side, within = divmod(place, 128)  # each half: 64 bytes of low nibbles, 32 of two high bits
        quarter, lane = divmod(within, 32)
        low = block[64 * side + 32 * (quarter % 2) + lane] >> 4 * (quarter // 2) & 15
        top = block[128 + 32 * side + lane] >> 2 * quarter & 3
        weights.append(half(block, 208) * signed(block[192 + place // 16]) * (low + 16 * top - 32))
    return weights


def iq4_xs(block: Block) -> list[float]:
    tops = struct.unpack_from("<H", block, 2)[0]
    weights = []
    for part in range(8):
        scale = (block[4 + part // 2] >> 4 * (part % 2) & 15) | (tops >> 2 * part & 3) << 4
        codes = halves(block[8 + 16 * part : 24 + 16 * part])
        weights += [half(block, 0) * (scale - 32) * _IQ4[code] for code in codes]
    return weights


# type -> (transcription, where a float16 is, where an exponent is)
TYPES: dict[str, tuple[Callable[[Block], list[float]], tuple[int, ...], int | None]] = {
    "Q8_0": (q8_0, (0,), None),
    "Q4_0": (q4_0, (0,), None),
    "Q4_1": (q4_1, (0, 2), None),
    "Q5_0": (q5_0, (0,), None),
    "Q5_1": (q5_1, (0, 2), None),
    "Q4_K": (q4_k, (0, 2), None),
    "Q5_K": (q5_k, (0, 2), None),
    "Q6_K": (q6_k, (208,), None),
    "IQ4_NL": (iq4_nl, (0,), None),
    "IQ4_XS": (iq4_xs, (0,), None),
    "MXFP4": (mxfp4, (), 0),
}


@pytest.mark.parametrize("name", TYPES)
def test_random_blocks_are_what_the_description_says(name: str) -> None:
    transcription, floats, exponent = TYPES[name]
    kind = gguf.GGMLQuantizationType[name]
    num_weights, num_bytes = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(9)
    blocks = generator.integers(0, 256, (3, 2, num_bytes)).astype(np.uint8)
    for at in floats:
        values = generator.uniform(-0.02, 0.02, (3, 2, 1)).astype(np.float16)
        blocks[:, :, at : at + 2] = values.view(np.uint8)
    if exponent is not None:
        blocks[:, :, exponent] = generator.integers(115, 130, (3, 2))
    expected = np.array([[transcription(block.tobytes()) for block in row] for row in blocks])
    rows = blocks.reshape(3, -1)
    found = dequantised(rows, kind).numpy()
    assert found.shape == (3, 2 * num_weights)
    # d * sc * q - dmin * m rounds twice in float32.
    np.testing.assert_allclose(found, expected.reshape(3, -1), rtol=1e-6, atol=1e-7)
    codes = codes_of(torch.from_numpy(rows), name, num_bytes)
    assert np.array_equal(codes.dequantised().numpy(), found)  # and gguf-py's bits are those of the codes
