"""Rows are recognised by their tokens: in their place, moved, or after a step that was left out."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from outrider.plugins.rows import Rows, Session


def match(rows: Rows, texts: Sequence[Sequence[int]], num_new: int = 1) -> list[Session]:
    token_ids = np.zeros((len(texts) + 2, 4096), np.int32)
    for row, text in enumerate(texts):
        token_ids[row, : len(text)] = text
    return rows.match([text[len(text) - num_new :] for text in texts], np.array([*map(len, texts), 9, 9]), token_ids)


def test_moved_rows_keep_their_sessions() -> None:
    rows, texts = Rows(), [[number] * 80 for number in range(1, 5)]
    first = match(rows, texts, 0)
    texts = [[*text, 7] for text in texts]
    assert match(rows, texts[::-1]) == first[::-1]
    assert match(rows, [[*texts[2], 7, 8], [*texts[0], 7, 8]], 2) == [first[2], first[0]]
    assert match(rows, [[*texts[1], 9], [*texts[2], 7, 8, 9]]) == [first[1], first[2]], "one was away for a step"


def test_a_step_that_was_left_out() -> None:
    rows = Rows()
    [first] = match(rows, [[1] * 70])
    assert match(rows, [[*[1] * 70, 2, 3, 4, 5]]) == [first]


def test_another_text_in_its_row_is_another_session() -> None:
    rows = Rows()
    [first] = match(rows, [[1] * 70])
    assert match(rows, [[*[1] * 70, 2], [2] * 71])[0] is first
    assert first not in match(rows, [[2] * 90])
    assert len(rows.forget_unseen(-1)) == 3
    assert len(rows) == 0


def test_its_time_is_linear_in_rows() -> None:
    """A batch whose rows all move: 16 times the rows took 256 times as long where each was compared with each."""

    def seconds(count: int) -> float:
        rows, texts = Rows(), [[number % 50, number // 50, *([3] * 60)] for number in range(count)]
        match(rows, texts, 0)
        best = 9.0
        for _ in range(5):
            texts = [[*text, 4] for text in texts[::-1]]
            began = time.thread_time()
            match(rows, texts)
            best = min(best, time.thread_time() - began)
        return best

    assert seconds(1024) < 80 * seconds(64)
