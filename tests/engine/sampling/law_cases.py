"""What the tests of draft laws share: when a law of the device is the host's."""

from __future__ import annotations

from outrider.shared.messages import LAW_TOTAL, SparseLaw

# A count is a floor: float32 temperatures may move it by one, and what all the others lose the likeliest gains.
_MOST_LOST = 3


def expect_equal_laws(found: SparseLaw, expected: SparseLaw) -> None:
    """Tokens of one count or none may be left out of either."""
    assert sum(found.counts) == LAW_TOTAL
    assert list(found.counts) == sorted(found.counts, reverse=True)
    mine, theirs = (dict(zip(law.token_ids, law.counts, strict=True)) for law in (found, expected))
    for token_id in mine.keys() | theirs.keys():
        assert abs(mine.get(token_id, 0) - theirs.get(token_id, 0)) <= _MOST_LOST, token_id
    assert found.token_ids[0] == expected.token_ids[0]
