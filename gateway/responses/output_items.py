"""The items of a response's output, and the events by which they come: a function of the tokens alone.

Each token's text is read separately, so events and their order do not depend on how many tokens the verifier accepted
at once. Not here: the events of the whole response (response_stream.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.gateway.openai.answer_types import ChatTokenLogprob
from outrider.gateway.request.answers import AnswerOptions
from outrider.gateway.responses.tools import CalledTool, called_tools, custom_input
from outrider.gateway.tool_calls.chat_parts import call_id
from outrider.gateway.tool_calls.events import CallArguments, CallBegins, ContentText, Event, ReasoningText
from outrider.gateway.tool_calls.plan import OutputPlan

# hexadecimal digits of an item's id
_ID_DIGITS = 24
_MESSAGE, _REASONING, _CALL, _CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
_ID_PREFIXES = {_MESSAGE: "msg", _REASONING: "rs", _CALL: "fc", _CUSTOM: "ctc"}
# Kind of item to the prefix of its text events' types.
_TEXT_EVENTS = {
    _MESSAGE: "response.output_text",
    _REASONING: "response.reasoning_text",
    _CALL: "response.function_call_arguments",
    _CUSTOM: "response.custom_tool_call_input",
}
# Kind of item to the field of its text in the event that ends it.
_TEXT_NAMES = {_MESSAGE: "text", _REASONING: "text", _CALL: "arguments", _CUSTOM: "input"}

ResponseEvent = dict[str, Any]


@dataclass
class _Open:
    """The item that is being written."""

    kind: str
    item_id: str
    text: str = ""
    logprobs: list[ChatTokenLogprob] = field(default_factory=list)
    # A call's name, and its namespace if it has one.
    names: Mapping[str, str] = field(default_factory=dict)
    call_id: str = ""

    def part(self) -> dict[str, Any]:
        if self.kind == _REASONING:
            return {"type": "reasoning_text", "text": self.text}
        return {"type": "output_text", "text": self.text, "annotations": [], "logprobs": list(self.logprobs)}

    def item(self, status: str) -> dict[str, Any]:
        """Returns the item as JSON; its content is empty while it is in progress."""
        head = {"id": self.item_id, "type": self.kind, "status": status}
        if self.kind in (_CALL, _CUSTOM):
            return {**head, "call_id": self.call_id, **self.names, _TEXT_NAMES[self.kind]: self.text}
        content = [] if status == "in_progress" else [self.part()]
        if self.kind == _REASONING:
            return {**head, "summary": [], "content": content}
        return {**head, "role": "assistant", "content": content}


class OutputItems:
    """The items of a response's output. `push` each token's text, then `finish` once. Each returns its events, without
    their numbers.

    items: those that have ended.
    """

    def __init__(self, options: AnswerOptions) -> None:
        self.items: list[dict[str, Any]] = []
        self._key = f"{options.answer_id} {options.created} 0"
        self._plan = options.output or OutputPlan()
        self._parser = None if options.output is None else self._plan.parser()
        fields = {} if options.response is None else json.loads(options.response.fields)
        self._tools = called_tools(fields.get("tools", ()))
        # The arguments of a custom tool's call, whose input is sent once it is complete.
        self._arguments: list[str] = []
        self._open: _Open | None = None
        # Log-probabilities of tokens whose text has not come yet.
        self._logprobs: list[ChatTokenLogprob] = []

    def push(self, text: str, logprobs: Sequence[ChatTokenLogprob] = ()) -> list[ResponseEvent]:
        was_in_reasoning = self._parser is not None and self._parser.in_reasoning
        found = self._read(text)
        # A token that ends the reasoning may begin the answer too.
        if not was_in_reasoning or any(isinstance(event, ContentText) for event in found):
            self._logprobs += logprobs
        return self._events(found)

    def finish(self, *, is_complete: bool) -> list[ResponseEvent]:
        events = self._events(self._parser.finish(was_cut=not is_complete) if self._parser is not None else [])
        return events + self._close("completed" if is_complete else "incomplete")

    def _read(self, text: str) -> list[Event]:
        if self._parser is not None:
            return self._parser.push(text)
        return [ContentText(text)] if text else []

    def _events(self, found: Sequence[Event]) -> list[ResponseEvent]:
        events: list[ResponseEvent] = []
        for event in found:
            match event:
                case ReasoningText(text):
                    events += self._in(_REASONING) + self._delta(text)
                case ContentText(text):
                    events += self._in(_MESSAGE) + self._delta(text)
                case CallBegins(name=name):
                    tool = self._tools.get(name, CalledTool({"name": name}, is_custom=False))
                    kind = _CUSTOM if tool.is_custom else _CALL
                    events += self._begin(kind, names=tool.names, call_id=call_id(self._plan, self._key, event))
                case CallArguments(_, text) if self._open is not None and self._open.kind == _CUSTOM:
                    self._arguments.append(text)
                case CallArguments(_, text):
                    events += self._delta(text)
        return events

    def _in(self, kind: str) -> list[ResponseEvent]:
        return [] if self._open is not None and self._open.kind == kind else self._begin(kind)

    def _begin(self, kind: str, *, names: Mapping[str, str] | None = None, call_id: str = "") -> list[ResponseEvent]:
        events = self._close("completed")
        digest = hashlib.sha256(f"{self._key} item {len(self.items)}".encode()).hexdigest()
        item_id = f"{_ID_PREFIXES[kind]}_{digest[:_ID_DIGITS]}"
        self._open = opened = _Open(kind, item_id, names=names or {}, call_id=call_id)
        if kind != _MESSAGE:
            self._logprobs = []
        added = {"type": "response.output_item.added", "output_index": len(self.items)}
        events.append({**added, "item": opened.item("in_progress")})
        if kind == _MESSAGE:
            events.append(self._event("response.content_part.added", part=opened.part()))
        return events

    def _delta(self, text: str) -> list[ResponseEvent]:
        opened = self._open
        if opened is None or not text:
            return []
        opened.text += text
        if opened.kind != _MESSAGE:
            return [self._event(f"{_TEXT_EVENTS[opened.kind]}.delta", delta=text)]
        logprobs, self._logprobs = self._logprobs, []
        opened.logprobs += logprobs
        return [self._event(f"{_TEXT_EVENTS[opened.kind]}.delta", delta=text, logprobs=logprobs)]

    def _close(self, status: str) -> list[ResponseEvent]:
        opened = self._open
        if opened is None:
            return []
        events = []
        if opened.kind == _CUSTOM:
            arguments, self._arguments = "".join(self._arguments), []
            events = self._delta(custom_input(arguments))
        done: dict[str, Any] = {_TEXT_NAMES[opened.kind]: opened.text}
        if opened.kind == _MESSAGE:
            done["logprobs"] = opened.logprobs
        elif opened.kind == _CALL:
            done["name"] = opened.names["name"]
        events.append(self._event(f"{_TEXT_EVENTS[opened.kind]}.done", **done))
        if opened.kind == _MESSAGE:
            events.append(self._event("response.content_part.done", part=opened.part()))
        item = opened.item(status)
        events.append({"type": "response.output_item.done", "output_index": len(self.items), "item": item})
        self.items.append(item)
        self._open = None
        return events

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        """Returns an event of the open item."""
        opened = self._open
        place: dict[str, Any] = {"output_index": len(self.items), "item_id": opened.item_id if opened else ""}
        if opened is not None and opened.kind in (_MESSAGE, _REASONING):
            place["content_index"] = 0
        return {"type": kind, **place, **fields}
