"""How much memory this machine has left, and whether this process gives back or keeps what it no longer uses."""

from __future__ import annotations

import ctypes
import gc
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


# malloc.h of glibc
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4


def keep_freed_memory() -> None:
    """From now on freed memory stays with this process, with any C library but glibc as before.

    For training on a CPU, whose every step asks for the same large arrays: mapping them anew, page by page, took two
    fifths of an EAGLE-3 step on a target with 49,152 tokens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)  # no mappings of their own for large requests
        mallopt(_M_TRIM_THRESHOLD, -1)  # nothing is trimmed


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
