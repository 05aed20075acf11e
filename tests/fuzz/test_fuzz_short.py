"""A little of every target; `python -m tests.fuzz` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import fuzz
from tests.fuzz.tally import Tally

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]


def test_no_input_does_what_no_input_may_do(tmp_path: Path) -> None:
    tally = Tally()
    fuzz(tmp_path, 1_000, "", 1, tally)
    assert tally.findings == []
    assert tally.num_inputs >= 1_000
    assert len(tally.outcomes) > 50
    assert tally.num_bystander_streams > 0
