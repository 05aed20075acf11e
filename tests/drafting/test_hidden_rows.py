"""Rows by position against a dictionary: whatever is added, dropped and taken back, each row held is the newest one."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.drafting.hidden_rows import HiddenRows
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import HiddenStates

PROMPT_LEN = 10
LAYERS = (2, 5)
WIDTH = 3
NUMPY_DTYPES = {"float32": np.float32, "float16": np.float16}


def piece_of(
    position: int, values: list[int], dtype: str = "float32", width: int = WIDTH, layers: tuple[int, ...] = LAYERS
) -> HiddenStates:
    """Row of value v: 10 v + layer in every element, as the verifier lays it out: [layers, rows, width]."""
    rows = np.array(
        [[[10 * value + layer] * width for value in values] for layer in layers],
        NUMPY_DTYPES[dtype],
    )
    return HiddenStates(position - PROMPT_LEN, layers, len(values), width, dtype, rows.tobytes())


def row_of(value: int) -> list[float]:
    return [10.0 * value + layer for layer in LAYERS for _ in range(WIDTH)]


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 30), st.integers(0, 8)),
        st.tuples(st.just("join"), st.integers(0, 3), st.integers(1, 8)),
        st.tuples(st.just("forget"), st.integers(0, 35), st.just(0)),
        st.tuples(st.just("cut"), st.integers(0, 35), st.just(0)),
    ),
    max_size=30,
)


@settings(max_examples=400, deadline=None)
@given(ACTIONS)
def test_against_a_dictionary(actions: list[tuple[str, int, int]]) -> None:
    held, known = HiddenRows(), dict[int, int]()
    newest = 0
    for kind, place, count in actions:
        position = max(0, held.end - place) if kind == "join" else place
        if kind in ("add", "join"):
            values = list(range(newest, newest + count))
            newest += count
            held.add(piece_of(position, values), PROMPT_LEN)
            if count:
                if known and not min(known) <= position <= max(known) + 1:
                    known.clear()
                known = {key: value for key, value in known.items() if key < position}
                known |= {position + row: value for row, value in enumerate(values)}
        elif kind == "forget":
            held.forget_before(position)
            known = {key: value for key, value in known.items() if key >= position}
        else:
            held.cut_back(position)
            known = {key: value for key, value in known.items() if key < position}
        assert held.end - held.first == len(known)
        if known:
            assert (held.first, held.end) == (min(known), max(known) + 1)
            found = held.rows(held.first, held.end)
            assert found.tolist() == [row_of(known[key]) for key in sorted(known)]


def test_any_part_of_what_is_held_can_be_read() -> None:
    held = HiddenRows()
    held.add(piece_of(4, [4, 5, 6, 7]), PROMPT_LEN)
    assert held.rows(5, 7).tolist() == [row_of(5), row_of(6)]
    assert held.rows(4, 4).shape == (0, len(LAYERS) * WIDTH)
    for start, end in ((3, 5), (4, 9), (7, 6)):
        with pytest.raises(IndexError):
            held.rows(start, end)
    with pytest.raises(IndexError):
        HiddenRows().rows(0, 0)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_rows_keep_their_dtype(dtype: str) -> None:
    held = HiddenRows()
    held.add(piece_of(0, [1, 2], dtype), PROMPT_LEN)
    assert held.rows(0, 2).dtype == getattr(torch, dtype)
    assert held.rows(1, 2).tolist() == [row_of(2)]


def test_bfloat16_is_read_bit_by_bit() -> None:
    values = torch.tensor([[[1.5, -2.25]], [[3.0, 0.15625]]], dtype=torch.bfloat16)
    data = values.view(torch.int16).numpy().tobytes()
    held = HiddenRows()
    held.add(HiddenStates(-PROMPT_LEN, LAYERS, 1, 2, "bfloat16", data), PROMPT_LEN)
    assert held.rows(0, 1).tolist() == [[1.5, -2.25, 3.0, 0.15625]]


@pytest.mark.parametrize("change", [{"width": 4}, {"layers": (1, 2, 3)}, {"dtype": "float16"}], ids=str)
def test_rows_of_another_kind_are_refused_and_change_nothing(change: dict[str, object]) -> None:
    held = HiddenRows()
    held.add(piece_of(0, [1, 2]), PROMPT_LEN)
    with pytest.raises(InvalidRequest):
        held.add(piece_of(2, [3], **change), PROMPT_LEN)  # type: ignore[arg-type]
    assert held.rows(0, 2).tolist() == [row_of(1), row_of(2)]


def test_rows_before_the_prompt_are_refused() -> None:
    with pytest.raises(InvalidRequest):
        HiddenRows().add(piece_of(-1, [1]), PROMPT_LEN)


def test_the_memory_of_forgotten_rows_is_given_back() -> None:
    held = HiddenRows()
    held.add(piece_of(0, list(range(1000))), PROMPT_LEN)
    held.forget_before(999)
    row = held.rows(999, 1000)
    assert row.untyped_storage().nbytes() == row.nbytes
