"""Rows of logits and sampling fields that the tests of the sampling kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.kernels.sampling_support.transforms import Transforms
from tests.kernels.triton_device import device

# (temperature, top_k, top_p, min_p); each is exact in float32.
FIELDS = [
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.75, 5, 1.0, 0.0),
    (1.5, 0, 0.875, 0.0),
    (1.0, 0, 1.0, 0.125),
    (0.5, 20, 0.75, 0.0625),
    (2.0, 40, 0.96875, 0.0),
    (0.0, 3, 0.5, 0.5),
    (1.0, 1, 1.0, 0.0),
    (1.0, 0, 0.0078125, 0.0),
    (1.25, 1000, 0.5, 0.0),
    (1.0, 0, 1.0, 1.0),
]


def transforms(fields: Sequence[tuple[float, int, float, float]]) -> Transforms:
    return Transforms.of_rows(fields, device())


def rows(fields: Transforms, chosen: list[int]) -> Transforms:
    return Transforms(fields.temperatures[chosen], fields.top_ks[chosen], fields.top_ps[chosen], fields.min_ps[chosen])


def random_logits(
    num_rows: int, vocab_size: int, dtype: torch.dtype, spread: float = 3.0, seed: int = 0
) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(num_rows, vocab_size, generator=generator) * spread).to(dtype).to(device())


def random_keys(num_rows: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, (num_rows, 2), generator=generator)
    return words.to(torch.int32).to(device())
