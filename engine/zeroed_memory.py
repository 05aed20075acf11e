"""Zero tensors whose memory is committed as it is used: KV caches, recurrent states and hidden states of positions."""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys

import torch

# bytes; smallest tensor in huge pages where the system has them; two of the usual 2 MiB, as numpy does
_LEAST_IN_HUGE_PAGES = 1 << 22


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Returns zeros. On the CPU pages are committed at first use: zeroing 512 MiB at start would take 0.6 to 1.7 s.

    Not from the heap, which clears memory that it has used before, and so commits it: up to 32 MiB with glibc.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if num_bytes >= _LEAST_IN_HUGE_PAGES and sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(shape)


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
