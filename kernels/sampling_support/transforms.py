"""The sampling parameters of a batch of rows, as the kernels and their references take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from outrider.kernels.errors import KernelArgumentError


class Transforms(NamedTuple):
    """The sampling transforms of each row, on the logits' device: float32 [R] temperature (0 = argmax), top-p (1 = off)
    and min-p (0 = off), int32 [R] top-k (0 = off)."""

    temperatures: torch.Tensor
    top_ks: torch.Tensor
    top_ps: torch.Tensor
    min_ps: torch.Tensor

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[float, int, float, float]], device: torch.device) -> Transforms:
        """Builds the tensors from each row's (temperature, top-k, top-p, min-p)."""
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
        columns = zip(*rows, strict=True)
        return cls(*(torch.tensor(c, dtype=dtype, device=device) for c, dtype in zip(columns, dtypes, strict=True)))

    def check(self, num_rows: int) -> None:
        """Raises KernelArgumentError unless each field has one number of its dtype per row."""
        expected = {
            "temperatures": torch.float32,
            "top_ks": torch.int32,
            "top_ps": torch.float32,
            "min_ps": torch.float32,
        }
        for name, dtype in expected.items():
            check_vector(name, getattr(self, name), dtype, (num_rows,))


def check_vector(name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Raises KernelArgumentError unless `tensor` is contiguous and of this dtype and shape."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise KernelArgumentError(
            f"{name} must be contiguous {dtype} {list(shape)}, not {tensor.dtype} {list(tensor.shape)}"
        )


def check_logits(logits: torch.Tensor) -> None:
    """Raises KernelArgumentError unless `logits` is [R, V] float32, bfloat16 or float16 with contiguous rows."""
    if logits.dim() != 2 or logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise KernelArgumentError(f"logits must be float [rows, vocab], not {logits.dtype} {list(logits.shape)}")
    if logits.shape[1] == 0 or logits.stride(1) != 1:
        raise KernelArgumentError("logits must have at least one column and contiguous rows")
