"""The position of a client in an answer, as a server-sent event's id: `<request id>:<cursor>`.

A cursor has one part per choice, separated by dots: the number of output tokens in its events so far, with an `f` once
its last event is among them, or `-` before its first event. Choices after the last part have had no event. `$` at the
end: the usage or receipt of the whole answer has been sent too, and only the end mark is left.

    cmpl-4f1c:17       one choice, 17 tokens        cmpl-4f1c:9f.-.12     three, the first has ended

An answer of /v1/responses or /v1/messages has several events per token, so its part also has the last event's number,
behind an `e`:

    resp_4f1c:17e40    one choice, 17 tokens in the events 0 to 40

In an answer without a seed, tokens that are decoded again, because Redis has lost them, come out differently. So its
cursor names the session at a verifier that the last token came from, by its epoch in the log behind an `s`:

    cmpl-4f1c:17s613566756     the last of the 17 tokens came from session 613566756

Tokens whose text is held back (a possible stop string) count with the event that brings the text. Not here: which
events there are (openai/answer_stream.py, responses/response_stream.py, anthropic/message_answer.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from outrider.shared.errors import InvalidRequest

LAST_EVENT_ID = "Last-Event-ID"
_PART = r"(?:-|[0-9]{1,10}(?:s[0-9]{1,15})?(?:e[0-9]{1,10})?f?)"
_CURSOR = re.compile(rf"({_PART}(?:\.{_PART})*)(\$?)")


@dataclass(frozen=True)
class Seen:
    """The part of one choice that a client has seen: output tokens [0, num_tokens) and, if `finished`, its last event.
    event: the last one's number, where events are numbered. epoch: of the last token's session, where it matters; None:
    the client cannot tell.
    """

    num_tokens: int = 0
    finished: bool = False
    event: int | None = None
    epoch: int | None = 0

    def __str__(self) -> str:
        epoch = f"s{self.epoch}" if self.epoch else ""
        event = "" if self.event is None else f"e{self.event}"
        return f"{self.num_tokens}{epoch}{event}{'f' if self.finished else ''}"


@dataclass(frozen=True)
class EventCursor:
    """A client's position in an answer. choices: in the answer's order, None before the first event. ended: the client
    has seen the usage or receipt.
    """

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


class EventNumbers:
    """Numbers the events of an answer with one choice, from 0. Events that the client has `seen` are numbered too."""

    def __init__(self, answer_id: str, seen: EventCursor) -> None:
        first = seen.of(0)
        self._answer_id = answer_id
        self._last_seen = -1 if first is None or first.event is None else first.event
        self.count = 0
        # Per session, in order: the output length at its last token so far, and its epoch.
        self._sessions: list[tuple[int, int]] = []

    def take(self, num_tokens: int, epoch: int) -> None:
        """Tells how far the output has come, and in which session (GenerationUpdate.epoch). Of the events that follow,
        those of text that was held back belong to tokens before.
        """
        if self._sessions and self._sessions[-1][1] == epoch:
            self._sessions.pop()
        self._sessions.append((num_tokens, epoch))

    def next_id(self, num_tokens: int, *, finished: bool) -> str | None:
        """Returns the next event's id; None: the client has it. num_tokens: those behind the events up to it."""
        number = self.count
        self.count += 1
        if number <= self._last_seen:
            return None
        epochs = (epoch for end, epoch in self._sessions if 0 < num_tokens <= end)
        return f"{self._answer_id}:{Seen(num_tokens, finished, number, next(epochs, 0))}"


def parse_event_id(text: str) -> tuple[str, EventCursor]:
    """Returns the request's id and the cursor. Raises InvalidRequest."""
    request_id, _, cursor = text.strip().rpartition(":")
    match = _CURSOR.fullmatch(cursor)
    if not request_id or match is None:
        raise InvalidRequest(f"{LAST_EVENT_ID} is not the id of an event of this server", param=LAST_EVENT_ID)
    choices = tuple(_seen(part) for part in match[1].split("."))
    return request_id, EventCursor(choices, ended=bool(match[2]))


def _seen(part: str) -> Seen | None:
    if part == "-":
        return None
    tokens, _, event = part.removesuffix("f").partition("e")
    num_tokens, _, epoch = tokens.partition("s")
    return Seen(int(num_tokens), part.endswith("f"), int(event) if event else None, int(epoch or 0))
