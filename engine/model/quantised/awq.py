"""AWQ as its GEMM kernel wants it: codes and zeros packed along the outputs, in an order of its own.

w[n, k] = (q - z) * scales[g, n], g = k // group_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.engine.model.quantised.packed_weight import Format, PackedWeight
from outrider.engine.model.quantised.unpack import signed, unpack_words
from outrider.kernels.linear.codes import Codes, without_zeros

_NUM_BITS = 4
# Bit position of each of a word's eight outputs (AutoAWQ packs 0 2 4 6 1 3 5 7).
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


def codes(weight: PackedWeight, settings: Mapping[str, Any]) -> Codes:
    numbers, scales = _in_order(weight.read(".qweight")), weight.read(".scales")
    inputs, outputs = numbers.shape
    group_size = int(settings.get("group_size", 128))
    group_size = inputs if group_size == -1 else group_size
    weight.require_shape("scales", scales.shape, (-(-inputs // group_size), outputs))
    zeros = _in_order(weight.read(".qzeros"))
    weight.require_shape("qzeros", zeros.shape, scales.shape)
    groups = torch.arange(inputs) // group_size
    return Codes(signed(numbers.T, _NUM_BITS), scales.T, groups, without_zeros(signed(zeros.T, _NUM_BITS)))


def _in_order(words: torch.Tensor) -> torch.Tensor:
    codes = unpack_words(words, _NUM_BITS).reshape(len(words), -1, 8)
    return codes[:, :, list(_PLACES)].flatten(1)


FORMAT = Format.of_codes((".qweight", ".qzeros", ".scales"), codes)
