"""Unpacks small integers from packed words, and 4-bit floats."""

from __future__ import annotations

import torch

# e2m1: a sign bit, two bits of exponent, one of mantissa (OCP microscaling formats 1.0, table 6).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_words(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Unpacks int32 [R, W] -> uint8 [R, W * 32 / num_bits], lowest bits first. num_bits divides 32."""
    data = words.contiguous().view(torch.uint8)  # little-endian
    if num_bits == 8:
        return data
    shifts = torch.arange(0, 8, num_bits, dtype=torch.uint8)
    codes: torch.Tensor = (data[..., None] >> shifts) & (2**num_bits - 1)
    return codes.flatten(-2)


def unpack_stream(words: torch.Tensor, num_bits: int, count: int) -> torch.Tensor:
    """Unpacks int32 [R, W] -> uint8 [R, count]: a bit stream per row, lowest first; numbers may straddle two words."""
    if 32 % num_bits == 0:
        return unpack_words(words, num_bits)[:, :count]
    bits = unpack_words(words, 1)[:, : count * num_bits].reshape(-1, count, num_bits)
    places = torch.arange(num_bits, dtype=torch.uint8)
    codes: torch.Tensor = (bits << places).sum(2, dtype=torch.uint8)
    return codes


def signed(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Converts uint8 codes of 0 to 2^bits - 1 -> int8 by subtracting 2^(bits - 1)."""
    numbers: torch.Tensor = codes.to(torch.int16) - 2 ** (num_bits - 1)
    return numbers.to(torch.int8)


def doubled_e2m1_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Unpacks uint8 [..., n], two numbers a byte, low half first -> int8 [..., 2n], twice the numbers."""
    return (2 * e2m1_pairs(codes)).to(torch.int8)


def e2m1_pairs(codes: torch.Tensor) -> torch.Tensor:
    """Unpacks uint8 [..., n], two numbers a byte, low half first -> bfloat16 [..., 2n], exact."""
    levels = torch.tensor([*_E2M1, *(-level for level in _E2M1)], dtype=torch.bfloat16)
    return torch.stack((levels[(codes & 15).int()], levels[(codes >> 4).int()]), dim=-1).flatten(-2)


def e8m0(codes: torch.Tensor) -> torch.Tensor:
    """Converts exponents of powers of two, uint8 or float8_e8m0 -> float32; code 255 is NaN."""
    return codes.view(torch.float8_e8m0fnu).float()
