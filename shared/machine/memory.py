"""Reads the machine's available memory, and sets how this process allocates and returns memory."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def available_memory_bytes() -> int | None:
    """Returns the available memory of the machine, or of this process's control group if less; None if unknown."""
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
    """Returns to the system the memory that glibc keeps after threads freed it; other C libraries have no such call."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def use_huge_pages() -> None:
    """Makes torch use huge pages for arrays from 2 MiB on; must be called before the first one is made.

    For training on a CPU, where every step maps large arrays again: with small pages, that took two fifths of an
    EAGLE-3 step on a target with 49,152 tokens. Keeping freed memory saves the same time, but the heap grows to three
    times the size within 200 steps.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


@contextmanager
def imports_kept() -> Iterator[None]:
    """Disables garbage collection during a service's imports, and exempts the objects they made from it afterwards.

    torch and transformers make half a million permanent objects. Scanning them repeatedly took a sixth of a verifier's
    start.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextmanager
def collection_paused() -> Iterator[None]:
    """Disables garbage collection while a thread holds a long value without cycles: a collection scans all of it, 0.1 s
    for 4 MB of JSON, and no other thread runs meanwhile.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def let_go(value: object) -> None:
    """Frees a value of JSON piece by piece: freed at once, 4 MB of it keep all threads waiting for 20 ms."""
    pieces = [value]
    while pieces:
        piece = pieces.pop()
        if isinstance(piece, dict):
            pieces.extend(piece.values())
            piece.clear()
        elif isinstance(piece, list):
            pieces.extend(piece)
            piece.clear()
