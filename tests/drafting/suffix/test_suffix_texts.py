"""Outputs of ended sessions: bounded, the least recently used goes first, and no salt sees another's."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

import pytest

from outrider.drafting.suffix.texts import PastTexts

DEPTH = 8
SALTS = ("", "a", "b")


def past(max_num_texts: int = 100, max_num_nodes: int = 10_000) -> PastTexts:
    return PastTexts(DEPTH, max_num_texts=max_num_texts, max_num_nodes=max_num_nodes)


def knows(texts: PastTexts, cache_salt: str, piece: Sequence[int]) -> bool:
    positions = texts.suffixes(cache_salt, array("i", piece))
    return bool(positions) and positions[0].depth == len(piece)


def test_only_its_own_salt_sees_a_text() -> None:
    texts = past()
    texts.add("ours", "one", [1, 2, 3])
    texts.add("theirs", "one", [4, 5, 6])
    assert knows(texts, "ours", [1, 2, 3])
    assert knows(texts, "theirs", [4, 5, 6])
    assert texts.suffixes("", array("i", [1, 2, 3])) == []
    for token in (4, 5, 6):
        assert not knows(texts, "ours", [token])


def test_the_oldest_goes_when_there_are_too_many() -> None:
    texts = past(max_num_texts=3)
    for number in range(5):
        texts.add("", str(number), [10 * number, 10 * number + 1])
    assert len(texts) == 3
    assert [knows(texts, "", [10 * number]) for number in range(5)] == [False, False, True, True, True]


def test_a_text_that_was_of_use_stays() -> None:
    texts = past(max_num_texts=2)
    texts.add("", "used", [1, 2, 3])
    texts.add("", "unused", [4, 5, 6])
    (position, _shorter) = texts.suffixes("", array("i", [1, 2]))
    texts.touch(texts.tree.text_of(position))
    texts.touch(array("i", [4, 5, 6]))  # of equal content, but none of ours
    texts.add("", "new", [7, 8, 9])
    assert [knows(texts, "", [token]) for token in (1, 4, 7)] == [True, False, True]


def test_a_session_that_ends_again_counts_once() -> None:
    """It was opened anew here after a failover, with the output that it had left."""
    texts = past()
    texts.add("", "other", [1, 9])
    texts.add("", "one", [1, 2])
    texts.add("", "one", [1, 2, 3])
    (position,) = texts.suffixes("", array("i", [1]))
    assert {follower.token_id: follower.share for follower in texts.tree.followers(position, 0.0)} == {2: 0.5, 9: 0.5}
    texts.add("", "one", [])
    assert not knows(texts, "", [2])
    assert len(texts) == 1


@pytest.mark.parametrize("max_num_nodes", [6, 50, 400])
def test_a_long_stream_of_sessions_stays_within_its_nodes(max_num_nodes: int) -> None:
    rng = random.Random(0)
    texts = past(max_num_nodes=max_num_nodes)
    outputs: dict[tuple[str, str], list[int]] = {}
    for number in range(600):
        key = (rng.choice(SALTS), str(number))
        # A token that no other session has marks each position in this one.
        output = [token for position in range(rng.randrange(30)) for token in (number * 100 + position + 1, 0)]
        texts.add(*key, output)
        if output:
            outputs[key] = output
        assert texts.tree.num_nodes <= max_num_nodes
    kept = list(outputs)[len(outputs) - len(texts) :]
    assert 0 < len(kept) < 100
    for key, output in outputs.items():
        for salt in SALTS:
            visible = [knows(texts, salt, [token]) for token in output if token]
            if key not in kept or salt != key[0]:
                assert not any(visible)
            elif len(output) <= (max_num_nodes - 2) // 2:
                assert all(visible)
            else:
                assert visible[-1], "the end of one that is too long"


def test_the_end_of_a_text_that_is_too_long_is_kept() -> None:
    texts = past(max_num_nodes=21)
    texts.add("", "small", [500, 501])
    texts.add("", "long", list(range(100)))
    assert texts.tree.num_nodes <= 21
    assert not knows(texts, "", [500])
    assert not knows(texts, "", [89])
    assert knows(texts, "", list(range(93, 100)))


def test_no_text_is_kept_where_none_may_be() -> None:
    texts = past(max_num_texts=0)
    texts.add("", "one", [1, 2, 3])
    assert (len(texts), texts.tree.num_nodes, knows(texts, "", [1])) == (0, 1, False)


def test_texts_of_many_salts_leave_no_nodes_behind() -> None:
    texts = past(max_num_texts=3)
    for number in range(50):
        texts.add(f"salt {number}", "one", [1, 2, 3, 4])
    assert texts.tree.num_nodes == 1 + 3 * 5
    assert [knows(texts, f"salt {number}", [1, 2]) for number in range(50)] == [False] * 47 + [True] * 3
