"""Reads a model's output: reasoning, text and tool calls as events, in the order in which they were written.

The events are a function of the characters alone: the reader is a coroutine that takes them one by one (reader.py).
Text in front of a marker or after it keeps all but the whitespace next to the marker. What begins like a call and is
none is text, its marker included. Not here: the markers (formats.py) and what is inside a call (*_calls.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.tool_calls import harmony, json_calls, pythonic_calls, tagged_calls
from outrider.gateway.tool_calls.context import MAX_HELD_CHARS, BodyContext
from outrider.gateway.tool_calls.events import CallArguments, CallBegins, ContentText, Event, ReasoningText
from outrider.gateway.tool_calls.formats import Body, CallFormat, OutputFormat
from outrider.gateway.tool_calls.reader import Reader, Step, outside
from outrider.gateway.tool_calls.symbols import Symbols, is_symbol

_DONE = object()
_SPACES = " \t\n\r\f\v"
_BODIES: Mapping[Body, Callable[[BodyContext], Step[bool]]] = {
    Body.OBJECT: json_calls.json_object,
    Body.ARRAY: json_calls.json_array,
    Body.NAMED: json_calls.named,
    Body.TAGGED: tagged_calls.tagged,
    Body.NESTED: tagged_calls.nested,
    Body.PYTHONIC: pythonic_calls.calls,
    Body.GEMMA: json_calls.gemma,
}
# Forms in which the name stands between the family's own marks: unlike a JSON object, which may be data, such an output
# means nothing but a call.
_ONLY_CALLS = frozenset((Body.NAMED, Body.TAGGED, Body.NESTED, Body.GEMMA))
# First character of a call that has no begin marker.
_BARE_BEGIN = {Body.OBJECT: "{", Body.PYTHONIC: "["}


@dataclass(frozen=True)
class Tools:
    """A request's tools, as far as the parser needs them. properties: per name, the schema of each argument.

    parallel: false ends the output with the first call's last character; what follows is not read. must_call: a grammar
    lets nothing but calls be written, so what the end of the output leaves undecided is the beginning of a call.
    """

    properties: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    parallel: bool = True
    must_call: bool = False


class _FirstCallEnds(Exception):
    """Raised after the first call, if a request takes one at most, to leave the readers of any call format."""


class OutputParser:
    """One choice's output: `push` its text as it comes, then `finish` once. Each returns the new events."""

    def __init__(
        self, output: OutputFormat, symbols: Symbols, tools: Tools | None = None, *, starts_in_reasoning: bool = False
    ) -> None:
        """symbols: how marker tokens stand in the text. starts_in_reasoning: the prompt has opened it."""
        self._symbols = symbols
        self._tools = tools or Tools()
        self._reader = Reader()
        self._events: list[Event] = []
        # Text of one kind that has been read and not yet reported: one push makes one event of it.
        self._kind: type[Event] = ContentText
        self._parts: list[str] = []
        self._num_calls = 0
        self._has_content = False
        self.in_reasoning = starts_in_reasoning
        spelled = output.spelled(symbols.spell)
        self._reasoning_row, self._row = spelled.reasoning, spelled.calls
        # Up to where a call's beginning was looked for at any length, in vain.
        self._searched_to = 0
        self._has_markers = False
        self._coroutine = self._output()
        self._is_done = False
        self.ended_with_call = False

    def push(self, text: str) -> list[Event]:
        if not self._is_done:
            self._reader.feed(text)
        return self._step()

    def finish(self, *, was_cut: bool = False) -> list[Event]:
        """Ends the output and returns the last events. was_cut: the model did not end it itself. If it did, an open
        call is complete, whatever is missing.
        """
        self._reader.end(was_cut=was_cut)
        return self._step()

    def _step(self) -> list[Event]:
        if not self._is_done:
            try:
                self._is_done = next(self._coroutine, _DONE) is _DONE
            except _FirstCallEnds:
                self._is_done = self.ended_with_call = True
        if self._parts:
            self._flush()
        events, self._events = self._events, []
        return events

    def _flush(self) -> None:
        text, self._parts = self._symbols.show("".join(self._parts)), []
        if not text:
            return
        if self._kind is CallArguments:
            self._events.append(CallArguments(self._num_calls - 1, text))
        else:
            self._events.append(ReasoningText(text) if self._kind is ReasoningText else ContentText(text))

    def _add(self, kind: type[Event], text: str) -> None:
        if kind is not self._kind:
            self._flush()
            self._kind = kind
        self._parts.append(text)

    # ---- what the coroutines report ----

    def text(self, text: str) -> None:
        if not text or self._is_cut_call():
            return
        self._has_content = self._has_content or not self.in_reasoning
        self._add(ReasoningText if self.in_reasoning else ContentText, text)

    def _is_cut_call(self) -> bool:
        """Returns whether text reported now was held back as a call's beginning, and the output ended within it."""
        return self._tools.must_call and self._reader.has_ended and not self.in_reasoning

    def begin(self, name: str, model_id: str = "") -> bool:
        """Begins a call and returns True, after which no text is given back; False if it is none."""
        if name not in self._tools.properties and not self._may_be_undeclared():
            return False
        self._reader.forget()
        self._flush()
        self._num_calls += 1
        self._events.append(CallBegins(self._num_calls - 1, self._symbols.show(name), model_id))
        return True

    def _may_be_undeclared(self) -> bool:
        """Returns whether a name that no tool has makes a call, so that the caller can answer that there is no such
        tool: in an output that has held nothing but calls so far. Behind text it is an example of a call.
        """
        is_only_calls = self._row is not None and self._row.body in _ONLY_CALLS
        return is_only_calls and bool(self._tools.properties) and not self._has_content

    def arguments(self, text: str) -> None:
        if text:
            self._add(CallArguments, text)

    def end(self) -> None:
        if not self._tools.parallel:
            raise _FirstCallEnds

    # ---- the coroutines ----

    def _output(self) -> Step[None]:
        if self._row is not None and self._row.body is Body.HARMONY:
            yield from harmony.messages(self._reader, self._row, self)
            return
        if self.in_reasoning:
            if self._reasoning_row is not None:
                yield from self._reader.match(self._reasoning_row.begin)  # some models repeat it
            yield from self._reasoning()
        yield from self._content()

    def _reasoning(self) -> Step[None]:
        """Reads reasoning up to its end marker, or to a call's begin marker if that is a special token."""
        row, reader = self._reasoning_row, self._reader
        if row is None:
            return
        self.in_reasoning = True
        call_markers = () if self._row is None else (self._row.begin, *self._row.around())
        ends = [marker for marker in call_markers if is_symbol(marker[0])]
        plain = outside("".join({row.end[0], *(marker[0] for marker in ends), *_SPACES}))
        yield from reader.skip_space()
        space = ""
        while True:
            space += yield from reader.skip_space()
            if (yield from reader.match(row.end)):
                self.in_reasoning = False  # before the whitespace, which is none of it
                yield from reader.skip_space()
                return
            if (yield from reader.any_follows(ends)):
                break
            more = (yield from reader.run(plain)) or (yield from reader.take())
            if not more:
                self.text(space)
                break
            self.text(space + more)
            space = ""
        self.in_reasoning = False

    def _content(self) -> Step[None]:
        reader, space, stops = self._reader, "", self._stops()
        plain = outside(stops)
        is_at_start = True
        while True:
            space += yield from reader.skip_space()
            given_back = None
            if is_at_start or (yield from reader.peek()) in stops:
                given_back = yield from self._markup(is_at_start=is_at_start)
            if given_back == "":
                yield from reader.skip_space()
                space = ""
                continue
            more = given_back or (yield from reader.run(plain)) or (yield from reader.take())
            if not more:
                self.text(space)
                return
            self.text(space + more)
            space, is_at_start = "", False

    def _stops(self) -> str:
        markers = [] if self._row is None else [self._row.begin, *self._row.also_begin, *self._row.around()]
        if self._reasoning_row is not None:
            markers.append(self._reasoning_row.begin)
        return "".join({*_SPACES, *(marker[0] for marker in markers)})

    def _markup(self, *, is_at_start: bool) -> Step[str | None]:
        """Takes what is no text, if some follows, and returns the part of it that turned out to be text ("": none).
        None: text follows.
        """
        reader, row, reasoning = self._reader, self._row, self._reasoning_row
        # Written out, the begin of reasoning is one at the start alone: a text may well name it.
        may_reason = reasoning is not None and (is_at_start or is_symbol(reasoning.begin[0]))
        if reasoning is not None and may_reason and (yield from reader.match(reasoning.begin)):
            yield from self._reasoning()
            return ""
        if row is None:
            return None
        for marker in row.around():
            if (yield from reader.match(marker)):
                return ""
        for begin in (row.begin, *row.also_begin):
            if (yield from reader.match(begin)):
                self._has_markers = True
                return "" if (yield from self._call()) else begin
        if is_at_start and (yield from self._bare_follows(row)):
            return "" if (yield from self._call()) else None
        return None

    def _bare_follows(self, row: CallFormat) -> Step[bool]:
        """Returns whether a call without its begin marker follows. Takes nothing."""
        if row.bare:
            return (yield from self._reader.follows(_BARE_BEGIN[row.body]))
        if not row.unmarked or self._has_markers:
            return False
        self._reader.mark()
        for piece in row.unmarked.split(" "):
            yield from self._reader.skip_space()
            found = yield from self._reader.match(piece)
            if not found:
                break
        self._reader.rewind()
        return found

    def _call(self) -> Step[bool]:
        """Reads a call after its begin marker, and its end. Returns False, with nothing taken, if it is no call."""
        reader, row = self._reader, self._row
        if row is None or not (yield from self._body(row)):
            return False
        yield from reader.skip_space()
        while row.body is Body.OBJECT and (yield from reader.match("}")):  # one too many
            yield from reader.skip_space()
        if row.end:
            yield from reader.match(row.end)
        while row.bare and (yield from reader.match(";")):
            yield from reader.skip_space()
            if not (yield from self._body(row)):
                self.text(";")
                break
        return True

    def _body(self, row: CallFormat) -> Step[bool]:
        reader = self._reader
        ends = tuple(marker for marker in (row.end, row.begin, *row.around()) if marker)
        may_hold_all = reader.position >= self._searched_to
        context = BodyContext(reader, row, self, ends, self._tools.properties, may_hold_all)
        reader.mark(MAX_HELD_CHARS)
        yield from reader.skip_space()
        if (yield from _BODIES[row.body](context)):
            return True
        self._searched_to = max(self._searched_to, reader.position)
        reader.rewind()
        return False
