"""What is imported stays: it is kept from the garbage collector, and only that."""

from __future__ import annotations

import gc

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


def test_a_failed_import_leaves_it_on() -> None:
    with pytest.raises(ImportError), imports_kept():
        import outrider.no_such_module  # type: ignore[import-not-found]  # noqa: F401
    assert gc.isenabled()
