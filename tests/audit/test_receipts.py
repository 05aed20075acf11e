"""Every answer of a fleet whose verifier dies is confirmed, and every change of an answer is found."""

from __future__ import annotations

import pytest

from tests.audit.receipts import CHANGES, KINDS, measured


@pytest.mark.storm
@pytest.mark.timeout(900)
def test_all_answers_are_confirmed_and_all_changes_found() -> None:
    table = measured(2 * len(KINDS))
    assert table.is_right, table.counts
    assert sum(counts["confirmed"] for counts in table.counts.values()) == 2 * len(KINDS)
    # No change is left untried because it draws the same tokens everywhere.
    assert all(table.counts[name]["found"] for name in CHANGES)
