"""Memory for the intermediate tensors of recorded programs: a tensor's place is free again once the tensor is gone.

Programs that are never run side by side share one arena: what a program writes, the next may overwrite.
"""

from __future__ import annotations

import weakref
from math import prod

import numpy as np
import torch

_ALIGNMENT = 64


class ArenaFull(Exception):
    """The recording needs more memory than the arena has."""


class Arena:
    """num_bytes of memory, of which only what is used costs anything."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        self._first = -int(self._memory.ctypes.data) % _ALIGNMENT
        self._free = [(0, num_bytes // _ALIGNMENT * _ALIGNMENT)]  # half-open ranges, ascending, never touching
        self._scratches: dict[tuple[int, int], np.ndarray] = {}

    def tensor(self, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor. Raises ArenaFull."""
        memory = torch.from_numpy(self._take(_num_bytes(shape, stride, dtype))).view(dtype)
        return torch.as_strided(memory, shape, stride)

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory is of this arena."""
        if tensor.is_mkldnn:
            return False
        start = int(self._memory.ctypes.data)
        return start <= tensor.data_ptr() < start + self._memory.nbytes

    def borrowed(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same tensor without a claim on its place, if that is in this arena."""
        if not self.holds(tensor):
            return tensor
        first = tensor.data_ptr() - int(self._memory.ctypes.data)
        num_bytes = _num_bytes(tuple(tensor.shape), tensor.stride(), tensor.dtype)
        memory = torch.from_numpy(self._memory[first : first + num_bytes]).view(tensor.dtype)
        return torch.as_strided(memory, tensor.shape, tensor.stride())

    def scratch(self, bytes_per_thread: int, num_threads: int) -> int:
        """Address of working memory that all programs share, aligned to 64. Good for as long as the arena.

        Only calls that ask for as much share it: a late thread's part lies where no other thread's part does.
        """
        size = bytes_per_thread, num_threads
        if size not in self._scratches:
            self._scratches[size] = np.empty(bytes_per_thread * num_threads + _ALIGNMENT, np.uint8)
        address = int(self._scratches[size].ctypes.data)
        return address + -address % _ALIGNMENT

    def _take(self, num_bytes: int) -> np.ndarray:
        length = -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
        for place, (start, end) in enumerate(self._free):
            if end - start >= length:
                self._free[place : place + 1] = [(start + length, end)] if end - start > length else []
                break
        else:
            raise ArenaFull(f"no {length} bytes in a row are free")
        chunk = self._memory[self._first + start : self._first + start + num_bytes]
        # torch holds this very object for as long as a tensor or a view of one uses the memory.
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
