"""How much of an answer a client has seen, in the id of a server-sent event: `<request id>:<cursor>`.

A cursor has one part per choice, separated by dots: the number of output tokens that its events have carried so far,
with an `f` once its last event is among them, or `-` before its first event. Choices after the last part have had no
event. `$` at the end: the usage of the whole answer has been sent too, and nothing but the end mark is left.

    cmpl-4f1c:17       one choice, 17 tokens        cmpl-4f1c:9f.-.12     three, the first has ended

Tokens whose text is held back (a stop string may have begun) are counted with the event that brings the text. Not here:
which events there are (responses.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import InvalidRequest

LAST_EVENT_ID = "Last-Event-ID"
_PART = r"(?:-|[0-9]{1,10}f?)"
_CURSOR = re.compile(rf"({_PART}(?:\.{_PART})*)(\$?)")


@dataclass(frozen=True)
class Seen:
    """Of one choice: output tokens [0, num_tokens) and, if `finished`, its last event."""

    num_tokens: int = 0
    finished: bool = False

    def __str__(self) -> str:
        return f"{self.num_tokens}f" if self.finished else str(self.num_tokens)


@dataclass(frozen=True)
class EventCursor:
    """`choices` in the answer's order, None before the first event; `ended`: the usage has been seen."""

    choices: tuple[Seen | None, ...] = ()
    ended: bool = False

    def of(self, choice: int) -> Seen | None:
        return self.choices[choice] if choice < len(self.choices) else None

    def by_choice(self) -> dict[int, Seen]:
        return {choice: seen for choice, seen in enumerate(self.choices) if seen is not None}

    def __str__(self) -> str:
        parts = ".".join("-" if seen is None else str(seen) for seen in self.choices)
        return f"{parts}$" if self.ended else parts


NOTHING_SEEN = EventCursor()


def parse_event_id(text: str) -> tuple[str, EventCursor]:
    """The request's id and the cursor. Raises InvalidRequest."""
    request_id, _, cursor = text.strip().rpartition(":")
    match = _CURSOR.fullmatch(cursor)
    if not request_id or match is None:
        raise InvalidRequest(f"{LAST_EVENT_ID} is not the id of an event of this server", param=LAST_EVENT_ID)
    choices = tuple(_seen(part) for part in match[1].split("."))
    return request_id, EventCursor(choices, ended=bool(match[2]))


def _seen(part: str) -> Seen | None:
    if part == "-":
        return None
    return Seen(int(part.removesuffix("f")), finished=part.endswith("f"))
