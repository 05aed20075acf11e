"""Where an output stands in the text predicted for it, against difflib and a search of every place."""

from __future__ import annotations

import difflib
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.shared.draft_policy.predicted_text import PredictedText

TEXT = list(range(100, 140))


def followed(output: list[int], predicted: list[int] = TEXT) -> PredictedText:
    text = PredictedText(predicted)
    text.extend(output)
    return text


def test_it_begins_at_the_beginning_and_follows() -> None:
    assert followed([]).continuation(3) == [100, 101, 102]
    assert followed(TEXT[:5]).continuation(2) == [105, 106]
    assert followed(TEXT).continuation(4) == []


def test_an_output_is_found_again_after_each_kind_of_edit() -> None:
    replaced = [*TEXT[:5], 7, 8, *TEXT[7:9]]
    inserted = [*TEXT[:5], 7, *TEXT[5:7]]
    deleted = [*TEXT[:5], *TEXT[12:14]]
    fenced = [1, 2, *TEXT[:2]]
    for output, expected in ((replaced, 109), (inserted, 107), (deleted, 114), (fenced, 102)):
        assert followed(output[:-2]).position is None or output == deleted
        assert followed(output).continuation(1) == [expected]


def test_of_equal_matches_the_nearest_ahead_wins_and_of_others_the_longest() -> None:
    predicted = [1, 2, 10, 1, 2, 20, 5, 1, 2, 30]
    assert followed([1, 2, 99, 1, 2], predicted).continuation(1) == [20]
    assert followed([1, 2, 10, 1, 2, 99, 5, 1, 2], predicted).continuation(1) == [30]
    assert followed([1, 2, 10, 1, 2, 20, 99, 10, 1, 2], predicted).continuation(1) == [20]  # behind, but longer


def deviations(predicted: list[int], output: list[int]) -> int:
    """Output tokens that were not what was expected next, the first of a file's fence aside."""
    text, wrong = PredictedText(predicted), 0
    for token_id in output:
        wrong += text.continuation(1) != [token_id]
        text.extend([token_id])
    return wrong


NAME, NEW = [7, 8], [70, 71, 72]
USES = [token for n in range(10) for token in (*TEXT[3 * n : 3 * n + 3], *NAME, 9)]


@pytest.mark.parametrize(
    "name", [[70, 71, 72], [70], [7, 80], [70, 8]], ids=["longer", "shorter", "its end", "its start"]
)
def test_a_rename_deviates_at_its_first_use_alone(name: list[int]) -> None:
    renamed = [token for n in range(10) for token in (*TEXT[3 * n : 3 * n + 3], *name, 9)]
    assert deviations(USES, renamed) <= len(name) + 2
    assert deviations(USES, USES) == 0


def test_a_replacement_that_is_not_made_again_is_expected_no_more() -> None:
    first, rest = [*TEXT[:3], *NEW, 9], USES[6:]
    text = followed([*first, *rest[:3]], USES)
    assert text.continuation(4) == [*NEW, 9]
    text.extend(rest[3:6])
    assert text.continuation(len(rest)) == rest[6:], "the original was written: the text is as predicted again"
    assert deviations(USES, [*first, *rest]) <= len(NEW) + 3


def test_half_a_replacement_loses_the_text_and_finds_it_again() -> None:
    text = followed([*TEXT[:3], *NEW, 9, *TEXT[3:6], NEW[0]], USES)
    assert text.continuation(3) == [*NEW[1:], 9]
    text.extend([50])
    assert text.position is None
    text.extend([9, *TEXT[6:8]])
    assert text.continuation(3) == [TEXT[8], *NAME], "what went wrong is expected no more"


def test_a_moved_block_is_followed_where_it_went_and_what_stood_around_it_too() -> None:
    moved = [*TEXT[:10], *TEXT[20:30], *TEXT[10:20], *TEXT[30:]]
    assert deviations(TEXT, moved) <= 3 * 2
    assert followed(moved).num_accepted == len(TEXT)


tokens = st.lists(st.integers(0, 3), max_size=40)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(tokens, tokens)
def test_a_position_is_always_behind_what_the_output_ends_with(predicted: list[int], output: list[int]) -> None:
    text = PredictedText(predicted)
    for place, token_id in enumerate(output):
        text.extend([token_id])
        assert 0 <= text.num_accepted <= len(predicted)
        assert text.num_accepted + text.num_rejected == len(predicted)
        if text.position is None:
            pair = output[max(0, place - 1) : place + 1]
            assert len(pair) < 2 or all(predicted[at : at + 2] != pair for at in range(len(predicted)))
        else:
            begin = text.position - min(text.match_len, place + 1)
            assert predicted[begin : text.position] == output[place + 1 - text.position + begin : place + 1]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.permutations(range(40)), st.data())
def test_what_an_edit_keeps_is_accepted(predicted: list[int], data: st.DataObject) -> None:
    """Of different tokens: all blocks of two or more that difflib finds, as the places are unique."""
    start = data.draw(st.integers(5, 20))
    end = data.draw(st.integers(start, 30))
    output = [*predicted[:start], *data.draw(st.lists(st.integers(50, 60), max_size=5)), *predicted[end:]]
    blocks = difflib.SequenceMatcher(None, predicted, output, autojunk=False).get_matching_blocks()
    assert followed(output, predicted).num_accepted == sum(block.size for block in blocks)


def test_costs_grow_with_the_text_alone() -> None:
    """CPU seconds: the same tokens everywhere, and an output that never agrees for long."""
    predicted = [1, 1, 2] * 10_000
    started = time.process_time()
    followed([1, 1, 1, 2, 2] * 1000, predicted)
    assert time.process_time() - started < 5
