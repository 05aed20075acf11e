"""gpt-oss: every message has a header with a channel and perhaps a recipient, then its body.

analysis is reasoning, a body for functions.NAME is that call's arguments, and all else is text. The prompt has written
the first message's start and role already.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outrider.gateway.tool_calls.context import MAX_HELD_CHARS
from outrider.gateway.tool_calls.formats import CallFormat
from outrider.gateway.tool_calls.lenient_json import LenientJson
from outrider.gateway.tool_calls.reader import Reader, Step, outside

_RECIPIENT = "to=functions."


class HarmonyWriter(Protocol):
    in_reasoning: bool

    def text(self, text: str) -> None: ...

    def begin(self, name: str, model_id: str = "") -> bool: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...


def messages(reader: Reader, row: CallFormat, writer: HarmonyWriter) -> Step[None]:
    """row.begin is the channel's marker; row.framing: start, message, and the ends of a message."""
    start, message, *ends = row.framing
    is_header = yield from reader.any_follows((row.begin, start, " to=", "to="))
    while (yield from reader.peek()):
        if is_header:
            header, complete = yield from _header(reader, message)
            if not complete:
                writer.text(header)
                return
            yield from _body(reader, _words(header, (row.begin, start, *ends)), (start, row.begin, *ends), writer)
        else:
            yield from _body(reader, [], (start, row.begin, *ends), writer)
        for end in ends:
            yield from reader.match(end)
        is_header = yield from reader.any_follows((row.begin, start))


def _header(reader: Reader, message: str) -> Step[tuple[str, bool]]:
    """Reads the text up to the message marker; returns it and whether the marker is there."""
    header = ""
    while not (yield from reader.match(message)):
        character = yield from reader.take()
        header += character
        if not character or len(header) > MAX_HELD_CHARS:
            return header, False
    return header, True


def _words(header: str, markers: tuple[str, ...]) -> list[str]:
    for marker in markers:
        header = header.replace(marker, " ")
    return header.split()


def _body(reader: Reader, header: list[str], ends: tuple[str, ...], writer: HarmonyWriter) -> Step[None]:
    names = [word.removeprefix(_RECIPIENT) for word in header if word.startswith(_RECIPIENT)]
    sink: Callable[[str], None] = writer.text
    if names and names[0] and writer.begin(names[0]):
        yield from reader.skip_space()
        if not (yield from LenientJson(reader, writer.arguments, ends).value()) and not reader.ended_by_cut:
            writer.arguments("{}")
        writer.end()
        sink = _nothing  # what may stand behind the arguments
    writer.in_reasoning = not names and "analysis" in header
    plain = outside("".join({end[0] for end in ends}))
    while not (yield from reader.any_follows(ends)):
        more = (yield from reader.run(plain)) or (yield from reader.take())
        if not more:
            break
        sink(more)
    writer.in_reasoning = False


def _nothing(_text: str) -> None:
    pass
