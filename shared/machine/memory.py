"""How much memory this machine has left, and how this process takes it and gives it back."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def available_memory_bytes() -> int | None:
    """Of the machine, or of this process's control group if that has less; None if unknown."""
    meminfo = Path("/proc/meminfo")
    if not meminfo.is_file():
        return None
    entries = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(entries["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip().isdigit():
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return available


def give_back_freed_memory() -> None:
    """glibc keeps what each thread has freed for its next request; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def use_huge_pages() -> None:
    """Of torch, for arrays from 2 MiB on; to be said before the first one is made.

    For training on a CPU, whose every step maps large arrays again: page by page, that took two fifths of an EAGLE-3
    step on a target with 49,152 tokens. Keeping freed memory instead saves as much, but the heap grows to three times
    the size within 200 steps.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def imports_kept() -> Iterator[None]:
    """For the imports of a service: no garbage is looked for meanwhile, nor later among what they made.

    torch and transformers make half a million objects that stay. Looking through them again and again took a sixth of a
    verifier's start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
