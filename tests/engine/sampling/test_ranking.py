"""Ranking a few of many values against a stable sort of all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.ranking import largest_first, likeliest

VALUES = st.lists(st.sampled_from([-np.inf, -40.0, -12.0, -3.0, -1.0, 0.0, 0.5]), min_size=1, max_size=40)


@settings(max_examples=300, deadline=None)
@given(values=VALUES, count=st.integers(1, 50))
def test_largest_first_is_the_head_of_a_stable_sort(values: list[float], count: int) -> None:
    array = np.array(values)
    assert largest_first(array, count).tolist() == np.argsort(-array, kind="stable")[:count].tolist()


@settings(max_examples=300, deadline=None)
@given(values=VALUES, count=st.integers(1, 50))
def test_the_likeliest_have_weight(values: list[float], count: int) -> None:
    array = np.array(values)
    order = [token for token in np.argsort(-array, kind="stable").tolist() if array[token] > -np.inf]
    assert likeliest(array, count).tolist() == order[:count]


@pytest.mark.parametrize("spread", [0.01, 1.0, 3.0, 12.0])
@pytest.mark.parametrize("count", [1, 32, 5000])
def test_large_vocabularies(spread: float, count: int) -> None:
    """Whichever floor is the one that leaves enough; float16 steps make for many ties."""
    values = np.random.default_rng(count).normal(0, spread, 50_000).astype(np.float16).astype(np.float64)
    expected = np.argsort(-values, kind="stable")[:count].tolist()
    assert largest_first(values, count).tolist() == expected
    assert likeliest(values, count).tolist() == expected
