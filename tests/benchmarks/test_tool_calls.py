"""Rounds that a lookup needs for a known output, counted by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.tool_calls import METHODS, TOOLS, figures, num_rounds_of, skeleton


@pytest.mark.parametrize(
    ("prompt", "output", "num_rounds"),
    [
        ([1, 2, 3], [7, 8, 9], 3),  # nothing to look up
        # 5; behind it the prompt had 6 7 8 9 1, and 2 comes for free
        ([5, 6, 7, 8, 9, 1, 2, 3], [5, 6, 7, 8, 9, 1, 2], 2),
        ([5, 6, 7, 8, 3], [5, 6, 7, 4], 2),  # two of four are right, then a correction
        ([5, 6], [], 0),
    ],
)
def test_ngram_rounds(prompt: list[int], output: list[int], num_rounds: int) -> None:
    assert num_rounds_of(METHODS["ngram"](), prompt, output) == num_rounds


def test_suffix_drafts_as_many_tokens_as_match() -> None:
    """Its default: after one token that matches one is drafted, after three three."""
    text = [5, 6, 7, 8, 9, 10, 11]
    assert num_rounds_of(METHODS["suffix"](), [*text, 3], text) == 3


@pytest.mark.parametrize("method", METHODS)
def test_only_answers_with_a_call_count(method: str) -> None:
    def answer(calls: list[Any], output: list[int], num_rounds: int) -> dict[str, Any]:
        choice = {"message": {"tool_calls": calls}, "token_ids": output, "outrider": {"rounds": [{}] * num_rounds}}
        return {"prompt_token_ids": [3, 4], "choices": [choice]}

    answers = [answer([{}], [1, 2, 8, 9], 2), answer([], [5] * 50, 50)]
    found = figures(method, answers, [1, 2, 7])
    # In front of the prompt stands 1 2.
    assert found == {"num_calls": 1, "num_tokens": 4, "tokens_per_round": 2, "alone": 1, "with_skeletons": 4 / 3}
    assert figures(method, [], [])["tokens_per_round"] == 0


def test_a_skeleton_is_a_call_without_arguments() -> None:
    assert skeleton(TOOLS[1]["function"]) == (
        '<tool_call>\n{"name": "calculate", "arguments": {"expression": ""}}\n</tool_call>\n'
    )
