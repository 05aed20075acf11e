"""Thinking tokens of paths against a count from the beginning, and which of the rules for permitted tokens yields."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.sampling.permitted import PermittedTokens
from outrider.engine.sampling.thinking import ThinkingCount
from outrider.shared.sampling_params import SamplingParams, ThinkingBudget

BEGIN, END, CALL, TEXT = 0, 1, 2, 3
paths = st.lists(st.integers(0, TEXT), max_size=9)


def is_used_up(budget: ThinkingBudget, output: list[int]) -> bool:
    thinking, num_tokens = budget.starts_open, 0
    for place, token in enumerate(output):
        if thinking:
            thinking = token not in (END, CALL)
            num_tokens += thinking
        else:
            begun = tuple(output[: place + 1][-len(budget.begin_token_ids) :])
            thinking = bool(budget.begin_token_ids) and begun == budget.begin_token_ids
    return thinking and num_tokens >= budget.max_tokens


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.integers(0, 3), st.sampled_from([(), (BEGIN,), (BEGIN, TEXT)]), st.booleans(), st.lists(paths, max_size=6))
def test_it_depends_on_the_path_alone(
    max_tokens: int, begin: tuple[int, ...], starts_open: bool, visited: list[list[int]]
) -> None:
    budget = ThinkingBudget(max_tokens, END, begin, (CALL,), starts_open)
    count = ThinkingCount(budget)
    for output in visited:
        assert count.is_used_up(output) == is_used_up(budget, output)


@pytest.mark.parametrize(
    ("fields", "permitted"),
    [
        ({}, [END]),
        ({"min_tokens": 9, "stop_token_ids": (END,)}, [END]),
        ({"allowed_token_ids": (END, TEXT)}, [END]),
        # What the caller forbids outright stays forbidden: the thinking goes on.
        ({"allowed_token_ids": (TEXT,)}, [TEXT]),
        ({"bad_words": ((END,),)}, [BEGIN, CALL, TEXT]),
    ],
)
def test_the_end_is_all_that_is_left_where_it_is_permitted(fields: dict, permitted: list[int]) -> None:
    params = SamplingParams(thinking_budget=ThinkingBudget(1, END, starts_open=True), max_tokens=20, **fields)
    rules = PermittedTokens(params, (), None)
    assert not rules.are_all
    assert np.flatnonzero(rules.mask([TEXT], TEXT + 1)).tolist() == permitted
    after = rules.mask([TEXT, END], TEXT + 1)
    assert np.flatnonzero(after).tolist() != [END]
