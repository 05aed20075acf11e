"""Both sides of the benchmark of a hybrid's step compute the same, from states that were replayed and from none."""

from __future__ import annotations

import pytest

from benchmarks.hybrid.__main__ import measure
from benchmarks.hybrid.model import save_random_hybrid
from benchmarks.hybrid.sides import Ours, Step, Theirs


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ours, Theirs]:
    path = str(save_random_hybrid(tmp_path_factory.mktemp("hybrid"), 4, 128))
    return Ours(path, "float32"), Theirs(path, "float32")


@pytest.mark.parametrize("step", [Step("decode", 1, 20), Step("verify", 4, 20), Step("prompt", 24, 0)])
def test_both_sides_compute_the_same(sides: tuple[Ours, Theirs], step: Step) -> None:
    row = measure(step, *sides, step.name, 1)
    assert row["largest_difference"] < 1e-4
    assert row["ours_s"]["p50"] > 0
