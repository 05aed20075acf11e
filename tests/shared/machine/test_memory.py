"""What is imported stays: it is kept from the garbage collector, and only that."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys

import pytest

from outrider.shared.machine.memory import imports_kept


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def num_cycles() -> int:
    gc.collect()
    return sum(isinstance(found, Cycle) for found in gc.get_objects())


def test_what_is_made_meanwhile_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    with imports_kept():
        assert not gc.isenabled()
        kept = [Cycle() for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)
    assert num_cycles() == 0, "they are not among what is looked through"
    Cycle()
    assert num_cycles() == 0, "and what comes after them is collected"


FAULTS_OF_LARGE_ARRAYS = """
import resource, sys
import torch
from outrider.shared.machine.memory import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
for _ in range(24):
    torch.empty(1 << 24).zero_()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(8):
    torch.empty(1 << 24).zero_()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library gives back what it likes")
def test_freed_memory_is_used_again_without_a_page_fault() -> None:
    """Arrays of 64 MiB, which glibc maps one by one otherwise; the heap grows for a few until there is room for one."""
    faults = {}
    for way in ("kept", "given back"):
        command = [sys.executable, "-c", FAULTS_OF_LARGE_ARRAYS, way]
        faults[way] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults["kept"] * 2 < faults["given back"]


def test_a_failed_import_leaves_it_on() -> None:
    with pytest.raises(ImportError), imports_kept():
        import outrider.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
