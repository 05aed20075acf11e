"""One answer's content blocks, as the events by which Anthropic streams them.

Each token's text is parsed separately and gives its own events, so events depend on the tokens and not on how these
were committed. Not here: the events around the blocks (message_answer.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from outrider.gateway.request.answers import AnswerOptions
from outrider.gateway.request.types import GenerationUpdate
from outrider.gateway.tool_calls.chat_parts import call_id
from outrider.gateway.tool_calls.events import CallArguments, CallBegins, ContentText, Event, ReasoningText
from outrider.gateway.tool_calls.plan import OutputPlan

StreamEvent = dict[str, Any]


class TokenTexts:
    """An output's text cut where its tokens end, however it arrives. What a stop sequence holds back comes with the
    rest of its token.
    """

    def __init__(self) -> None:
        self._text = ""
        self._lengths: deque[int] = deque()

    def add(self, update: GenerationUpdate) -> Iterator[str]:
        """Yields the texts that are complete now, one per token; after the last update also the remaining text."""
        self._text += update.text
        self._lengths.extend(map(len, update.token_texts))
        while self._lengths and self._lengths[0] <= len(self._text):
            length = self._lengths.popleft()
            text, self._text = self._text[:length], self._text[length:]
            yield text
        if update.finish_reason is not None and self._text:
            yield self._text


class ContentBlocks:
    """Content blocks made from an output. Pass the text of each token in order to `push`, then call `finish` once. Each
    returns the new events.
    """

    def __init__(self, options: AnswerOptions) -> None:
        self._plan = options.output or OutputPlan()
        self._parser = self._plan.parser()
        self._key = f"{options.answer_id} {options.created} 0"
        self._kind: str | None = None
        self._index = -1
        self.has_calls = False

    def push(self, text: str) -> list[StreamEvent]:
        return self._of(self._parser.push(text))

    def finish(self, *, was_cut: bool) -> list[StreamEvent]:
        return self._of(self._parser.finish(was_cut=was_cut)) + self._close()

    def _of(self, events: list[Event]) -> list[StreamEvent]:
        return [one for event in _joined(events) for one in self._of_event(event)]

    def _of_event(self, event: Event) -> list[StreamEvent]:
        match event:
            case ReasoningText(text):
                if not self._plan.include_reasoning:
                    return []
                thinking = {"type": "thinking", "thinking": "", "signature": ""}
                return self._open(thinking) + self._delta({"type": "thinking_delta", "thinking": text})
            case ContentText(text):
                return self._open({"type": "text", "text": ""}) + self._delta({"type": "text_delta", "text": text})
            case CallBegins(name=name):
                self.has_calls = True
                block: StreamEvent = {"type": "tool_use", "id": self._call_id(event), "name": name, "input": {}}
                return self._close() + self._open(block)
            case CallArguments(text=text):
                return self._delta({"type": "input_json_delta", "partial_json": text})

    def _open(self, block: StreamEvent) -> list[StreamEvent]:
        """Returns the events that open a block; none if a block of its type is open."""
        if self._kind == block["type"]:
            return []
        closed = self._close()
        self._kind, self._index = block["type"], self._index + 1
        return [*closed, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, delta: StreamEvent) -> list[StreamEvent]:
        return [{"type": "content_block_delta", "index": self._index, "delta": delta}]

    def _close(self) -> list[StreamEvent]:
        if self._kind is None:
            return []
        self._kind = None
        return [{"type": "content_block_stop", "index": self._index}]

    def _call_id(self, call: CallBegins) -> str:
        return call_id(self._plan, self._key, call).replace("call_", "toolu_", 1)


def _joined(events: list[Event]) -> list[Event]:
    """Joins neighbouring events of the same type into one, except for beginnings of calls."""
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallBegins) or isinstance(last, CallBegins | None) or type(last) is not type(event):
            joined.append(event)
        else:
            joined[-1] = replace(last, text=last.text + event.text)
    return joined
