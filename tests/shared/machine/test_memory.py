"""What is imported stays: it is kept from the garbage collector, and only that."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

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


NUM_FAULTS = """
import resource, sys
from outrider.shared.machine.memory import use_huge_pages
if sys.argv[1] == "huge":
    use_huge_pages()
import torch
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.empty(1 << 24).zero_()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(
    not HUGE_PAGES.is_file() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason=f"{HUGE_PAGES} does not say [madvise]: programs do not choose their pages here",
)
def test_large_arrays_in_huge_pages() -> None:
    """64 MiB are 16,384 small pages. Where the memory is in pieces, the kernel may find few huge ones, but some."""
    faults = {}
    for way in ("huge", "small"):
        command = [sys.executable, "-c", NUM_FAULTS, way]
        faults[way] = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert faults["huge"] < faults["small"] / 2


def test_a_failed_import_leaves_it_on() -> None:
    with pytest.raises(ImportError), imports_kept():
        import outrider.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
