"""Zero tensors whose memory is committed as it is used, for KV caches and recurrent states."""

from __future__ import annotations

import ctypes
import math
import mmap
import sys

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


def give_back(tensor: torch.Tensor) -> None:
    """Gives the system the memory of a tensor of `zeros` whose contents nobody needs, until it is used again.

    On Linux its whole pages are zeros then. Elsewhere, and on other devices, nothing happens.
    """
    if tensor.device.type != "cpu" or sys.platform != "linux":
        return
    memory = tensor.untyped_storage()
    start = -(-memory.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    num_bytes = (memory.data_ptr() + memory.nbytes()) // mmap.PAGESIZE * mmap.PAGESIZE - start
    if num_bytes > 0:  # pages that the system cannot take, such as locked ones, stay as they are
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(num_bytes), mmap.MADV_DONTNEED)
