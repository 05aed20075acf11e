"""Every line with speculation of vLLM's recipes does what docs/recipes.md says, and none is missing there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.hub_server import Hub
from tests.recipes.table import LINES, PAGE, is_run, outcome, page, page_row, rows_of_page, stand_in

# Of the default suite: a target's MTP layer, an EAGLE-3 head, and a refusal.
SOME = ("baidu/ERNIE-4.5-21B-A3B-PT", "meta-llama/Llama-3.1-8B-Instruct", "deepseek-ai/DeepSeek-V4-Flash")
_FIRST = {line[0]: number for number, line in reversed(list(enumerate(LINES, 1)))}
NUMBERS = [
    pytest.param(number, marks=() if number in {_FIRST[name] for name in SOME} else pytest.mark.storm)
    for number, row in enumerate(rows_of_page(), 1)
    if is_run(row)
]


@pytest.fixture(scope="module")
def around() -> Iterator[tuple[Hub, str, Path]]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with stand_in() as found:
        yield found
    torch.set_num_threads(before)


@pytest.mark.parametrize("number", NUMBERS)
async def test_a_line_does_what_the_page_says(number: int, around: tuple[Hub, str, Path]) -> None:
    """python -m tests.recipes.table renews the page."""
    hub, redis_url, folder = around
    own = folder / f"line-{number}"
    own.mkdir()
    row = await outcome(LINES[number - 1], hub, redis_url, own)
    assert row.refused or row.is_answered
    assert page_row(number, row) == rows_of_page()[number - 1]


def test_the_page_has_every_line() -> None:
    rows = rows_of_page()
    assert [row.split("`")[1].split()[0] for row in rows] == [line[0] for line in LINES]
    assert PAGE.read_text(encoding="utf-8") == page(rows)
    assert not any("**no**" in row for row in rows)
