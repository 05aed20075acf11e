"""Ids of events: what is written is read back, and nothing else is read."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.gateway.request.event_cursor import EventCursor, EventNumbers, Seen, parse_event_id
from outrider.shared.errors import InvalidRequest

NUMBERS = st.integers(0, 10**10 - 1)
PARTS = st.none() | st.builds(Seen, NUMBERS, st.booleans(), st.none() | NUMBERS, NUMBERS)
REQUEST_IDS = st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1, max_size=128)


@settings(deadline=None)
@given(REQUEST_IDS, st.lists(PARTS, min_size=1, max_size=6), st.booleans())
def test_round_trip(request_id: str, parts: list[Seen | None], ended: bool) -> None:
    """Request ids may hold colons, dots and dollars of their own."""
    cursor = EventCursor(tuple(parts), ended)
    assert parse_event_id(f"{request_id}:{cursor}") == (request_id, cursor)


def test_numbered_events_name_the_session_that_their_last_token_came_from() -> None:
    """Also events of text that was held back: they come with later tokens, and belong to earlier ones."""
    numbers = EventNumbers("m", EventCursor())
    ids = []
    for end, epoch, events in ((3, 0, (0, 3)), (5, 0, (4,)), (8, 7, (5, 6, 8))):
        numbers.take(end, epoch)
        ids += [numbers.next_id(num_tokens, finished=False) for num_tokens in events]
    assert ids == ["m:0e0", "m:3e1", "m:4e2", "m:5e3", "m:6s7e4", "m:8s7e5"]


@pytest.mark.parametrize(
    ("text", "cursor"),
    [
        ("r:17", EventCursor((Seen(17),))),
        ("r:9f.-.12", EventCursor((Seen(9, True), None, Seen(12)))),
        ("r:17e40", EventCursor((Seen(17, event=40),))),
        ("r:17e41f", EventCursor((Seen(17, True, 41),))),
        ("r:0", EventCursor((Seen(0),))),
        ("r:3f$", EventCursor((Seen(3, True),), ended=True)),
        (" r:3 ", EventCursor((Seen(3),))),
        ("r:0e0", EventCursor((Seen(0, event=0),))),
        ("r:17e42f", EventCursor((Seen(17, True, 42),))),
        ("r:17s2097153e42f", EventCursor((Seen(17, True, 42, 2097153),))),
        ("r:17s2.3", EventCursor((Seen(17, epoch=2), Seen(3)))),
    ],
)
def test_what_it_looks_like(text: str, cursor: EventCursor) -> None:
    assert parse_event_id(text) == ("r", cursor)
    assert f"r:{cursor}" == text.strip()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "r",
        ":3",
        "r:",
        "r:3.",
        "r:.3",
        "r:f",
        "r:3ff",
        "r:3e",
        "r:e3",
        "r:3s",
        "r:s3",
        "r:3e1s2",
        "r:3fe4",
        "r:3fe1",
        "r:+3",
        "r:٣",
        "r:-f",
        "r:3$$",
    ],
)
def test_what_is_no_id(text: str) -> None:
    with pytest.raises(InvalidRequest) as raised:
        parse_event_id(text)
    assert raised.value.param == "Last-Event-ID"


def test_choices_that_the_cursor_does_not_reach_have_not_been_seen() -> None:
    cursor = EventCursor((None, Seen(4)))
    assert [cursor.of(choice) for choice in range(4)] == [None, Seen(4), None, None]
    assert cursor.by_choice() == {1: Seen(4)}
