"""The context shared by the readers of all call formats. A reader is a coroutine that returns whether there was a call.

Until a name is known nothing has been reported, and the caller gives the text back; after it, what does not fit the
form ends the call. Arguments are passed on as strict JSON, unless the output was cut within them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from outrider.gateway.tool_calls.formats import CallFormat
from outrider.gateway.tool_calls.lenient_json import LenientJson
from outrider.gateway.tool_calls.reader import Reader, Step

# characters; longest text from a call's begin marker to its name; broken output can have this much after every marker
MAX_HELD_CHARS = 1024
_NAME = re.compile(r"[\w\-.:/]*")


class CallWriter(Protocol):
    """`begin` is called once per call, before its arguments; it says whether the call is taken. `end` follows them, and
    need not return: a reader has nothing left to do then that another call would miss.
    """

    def begin(self, name: str, model_id: str = "") -> bool: ...

    def arguments(self, text: str) -> None: ...

    def end(self) -> None: ...


@dataclass(frozen=True)
class BodyContext:
    """The context of reading one call's body. ends: markers that end a JSON value outside of strings. properties: per
    tool, the schema of each argument. may_hold_all: whether arguments in front of a name may be held at any length.
    """

    reader: Reader
    row: CallFormat
    writer: CallWriter
    ends: tuple[str, ...]
    properties: Mapping[str, Mapping[str, Any]]
    may_hold_all: bool = True

    def json(self, sink: Callable[[str], None], *, quote: str = "", is_python: bool = False) -> LenientJson:
        return LenientJson(self.reader, sink, self.ends, quote, is_python)

    def value_or_object(self, value: LenientJson) -> Step[None]:
        """Reads a call's arguments; none are {}."""
        if not (yield from value.value()) and not self.reader.ended_by_cut:
            self.writer.arguments("{}")


def name_of(reader: Reader) -> Step[str]:
    name = ""
    while more := (yield from reader.run(_NAME)):
        name += more
        if len(name) > MAX_HELD_CHARS:  # not behind a mark, which ends the text before
            reader.unread(name)
            return ""
    return name


def escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
