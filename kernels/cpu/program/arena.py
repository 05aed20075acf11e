"""Memory for the intermediate tensors of recorded programs; freed when a tensor is garbage-collected.

Programs that never run concurrently share one arena: each may overwrite what another wrote.
"""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch

_ALIGNMENT = 64  # bytes


class ArenaFull(Exception):
    """The recording needs more memory than the arena has."""


class Arena:
    """num_bytes of address space; the system commits only pages that are touched."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        self._first = -int(self._memory.ctypes.data) % _ALIGNMENT
        self._free = [(0, num_bytes // _ALIGNMENT * _ALIGNMENT)]  # half-open, ascending, never adjacent
        self._scratches: dict[tuple[int, int], np.ndarray] = {}

    def tensor(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor. Raises ArenaFull."""
        memory = torch.from_numpy(self._take(_num_bytes(shape, stride, dtype))).view(dtype)
        return torch.as_strided(memory, shape, stride)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Returns whether the tensor lies in this arena."""
        if tensor.is_mkldnn:
            return False
        start = int(self._memory.ctypes.data)
        return start <= tensor.data_ptr() < start + self._memory.nbytes

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a view of the tensor that does not keep its arena memory allocated."""
        if not self.holds(tensor):
            return tensor
        first = tensor.data_ptr() - int(self._memory.ctypes.data)
        num_bytes = _num_bytes(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        memory = torch.from_numpy(self._memory[first : first + num_bytes]).view(tensor.dtype)
        return torch.as_strided(memory, tensor.shape, tensor.stride())

    def scratch(self, bytes_per_thread: int, num_threads: int) -> int:
        """Address of scratch memory, aligned to 64 bytes, valid as long as the arena.

        Shared by all programs, but only between calls of equal size: a late thread's part must not overlap another
        thread's.
        """
        size = bytes_per_thread, num_threads
        if size not in self._scratches:
            self._scratches[size] = np.empty(bytes_per_thread * num_threads + _ALIGNMENT, np.uint8)
        address = int(self._scratches[size].ctypes.data)
        return address + -address % _ALIGNMENT

    def _take(self, num_bytes: int) -> np.ndarray:
        length = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for index, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[index : index + 1] = [(start + length, end)] if end - start > length else []
                break
        else:
            raise ArenaFull(f"no {length} contiguous bytes are free")
        chunk = self._memory[self._first + start : self._first + start + num_bytes]
        # torch references this object as long as a tensor or view uses the memory.
        weakref.finalize(chunk, self._give_back, start, start + length).atexit = False
        return chunk

    def _give_back(self, start: int, end: int) -> None:
        ranges = sorted([*self._free, (start, end)])
        merged = ranges[:1]
        for first, last in ranges[1:]:
            if first == merged[-1][1]:
                merged[-1] = (merged[-1][0], last)
            else:
                merged.append((first, last))
        self._free = merged


def _num_bytes(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> int:
    last = sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
    return (1 + last if prod(shape) else 1) * dtype.itemsize
