"""What an engine takes of a draft: ids that it has, tokens that are likely, and no token twice below one place."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.plugins.usable import Draft, usable


def took(draft: Draft, **limits: Any) -> tuple[list[int], list[int]]:
    found = usable(draft, **{"num_tokens": 8, "vocab_size": 10, "min_confidence": 0.5, "max_branches": 3, **limits})
    return list(found.token_ids), list(found.parents)


def test_a_chain_has_parents_and_is_cut() -> None:
    assert took(Draft([5, 6, 7])) == ([5, 6, 7], [-1, 0, 1])
    assert took(Draft([5, 6, 7]), num_tokens=2) == ([5, 6], [-1, 0])
    assert took(Draft([5, 6, 7], bytes([255, 204, 51]))) == ([5, 6], [-1, 0])
    assert took(Draft()) == ([], [])


def test_a_tree_s_unlikely_branch_takes_what_follows_it_along() -> None:
    tree = Draft([1, 2, 3, 4, 5], bytes([255, 100, 255, 255, 200]), [-1, -1, 0, 1, 2])
    assert took(tree) == ([1, 3, 5], [-1, 0, 1]), "2 is unlikely, and 4 follows it"


def test_a_token_twice_below_one_place_counts_once() -> None:
    """SGLang adds siblings' probabilities up: one that is there three times would be accepted three times as often."""
    assert took(Draft([4, 4, 4, 7], parents=[-1, -1, -1, 1])) == ([4], [-1])
    assert took(Draft([4, 4], parents=[-1, 0])) == ([4, 4], [-1, 0])


def test_an_engine_of_chains_takes_one_branch() -> None:
    assert took(Draft([1, 2, 3], parents=[-1, -1, 0]), max_branches=1) == ([1, 3], [-1, 0])


@pytest.mark.parametrize(
    "draft",
    [
        Draft([1, 10]),
        Draft([-1]),
        Draft([1, 2], parents=[-1]),
        Draft([1, 2], parents=[0, -1]),
        Draft([1, 2], parents=[-1, 7]),
        Draft([1, 2], parents=[-1, -2]),
    ],
    ids=["an id outside", "a negative id", "a parent too few", "its own parent", "no such parent", "below the text"],
)
def test_what_is_no_draft_is_none(draft: Draft) -> None:
    assert took(draft) == ([], [])
