"""Turns updates of the generation into Anthropic's answer: its events, and the whole message, which they add up to.

Not here: the content blocks (content_blocks.py), HTTP (servers/app.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NotRequired

from typing_extensions import TypedDict

from outrider.gateway.anthropic.content_blocks import ContentBlocks, StreamEvent, TokenTexts
from outrider.gateway.anthropic.errors import messages_error
from outrider.gateway.openai.answer_body import to_json
from outrider.gateway.openai.answer_types import ErrorAnswer, ReceiptBody
from outrider.gateway.openai.receipt_signature import ReceiptKey
from outrider.gateway.openai.usage import Account
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.event_cursor import NOTHING_SEEN, EventCursor, EventNumbers
from outrider.gateway.request.types import GenerationUpdate
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import FinishReason
from outrider.shared.strict_json import strict_json


class OutputTokensDetails(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    """input_tokens: of the prompt, without those that the verifier's cache held."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: NotRequired[OutputTokensDetails]


class Message(TypedDict):
    id: str
    type: str
    role: str
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    receipt: NotRequired[ReceiptBody]


class CountTokensAnswer(TypedDict):
    input_tokens: int


class MessageEvents:
    """The events of each update, and after the last one those of `end`."""

    def __init__(self, prepared: Prepared, receipt_key: ReceiptKey | None) -> None:
        self._options = prepared.options
        self._account = Account(prepared, receipt_key=receipt_key)
        self._texts = TokenTexts()
        self._blocks = ContentBlocks(prepared.options)
        self._last: GenerationUpdate | None = None
        self.num_tokens = 0

    def of(self, update: GenerationUpdate) -> Iterable[StreamEvent]:
        """Yields the events of an update. `num_tokens` then counts the tokens that the events so far come from."""
        is_first = self._last is None
        self._last = update
        self._account.add(0, update)
        if is_first:
            yield {"type": "message_start", "message": self._start()}
            yield {"type": "ping"}
        end = update.base_len + len(update.token_ids)
        for text in self._texts.add(update):
            self.num_tokens = min(self.num_tokens + 1, end)
            yield from self._blocks.push(text)
        if update.finish_reason is not None:
            self.num_tokens = end
            yield from self._blocks.finish(was_cut=update.finish_reason is not FinishReason.STOP)

    def end(self) -> Iterable[StreamEvent]:
        """Raises InternalError when the output has not finished."""
        self._account.check_finished()
        reason, sequence = self._stop()
        yield {
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": sequence},
            "usage": self._usage(),
            **self._account.receipt(),
        }
        yield {"type": "message_stop"}

    def _start(self) -> Message:
        usage = self._usage()
        usage["output_tokens"] = 0  # as if nothing had come yet, whatever the first commit holds
        usage.pop("output_tokens_details", None)
        return {
            "id": self._options.answer_id,
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }

    def _stop(self) -> tuple[str, str | None]:
        last = self._last
        if last is not None and isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        if last is None or last.finish_reason is not FinishReason.STOP:  # cut, by a grammar's dead end too
            is_full = self._options.fills_context and last is not None and last.finish_reason is FinishReason.LENGTH
            return "model_context_window_exceeded" if is_full else "max_tokens", None
        return "tool_use" if self._blocks.has_calls else "end_turn", None

    def _usage(self) -> MessageUsage:
        usage = self._account.usage()
        num_cached = usage["prompt_tokens_details"]["cached_tokens"]
        shown: MessageUsage = {
            "input_tokens": usage["prompt_tokens"] - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": usage["completion_tokens"],
        }
        if "completion_tokens_details" in usage:
            shown["output_tokens_details"] = {"thinking_tokens": usage["completion_tokens_details"]["reasoning_tokens"]}
        return shown


class MessageStream:
    """The bytes of each update's events. After the last update, call `end()`; after an error, `failed()`.

    Events are numbered. Those that the client has `seen` are made again, as they are always the same, and not sent.
    """

    def __init__(
        self, prepared: Prepared, seen: EventCursor = NOTHING_SEEN, receipt_key: ReceiptKey | None = None
    ) -> None:
        self._events = MessageEvents(prepared, receipt_key)
        self._numbers = EventNumbers(prepared.options.answer_id, seen)

    def events(self, _prompt_index: int, update: GenerationUpdate) -> bytes:
        self._numbers.take(update.base_len + len(update.token_ids), update.epoch)
        return self._bytes(self._events.of(update))

    def end(self) -> bytes:
        return self._bytes(self._events.end())

    def failed(self, error: ErrorAnswer) -> bytes:
        detail = error["error"]
        return f"event: error\ndata: {to_json(messages_error(detail['code'], detail['message']))}\n\n".encode()

    def _bytes(self, events: Iterable[StreamEvent]) -> bytes:
        return "".join(map(self._numbered, events)).encode()

    def _numbered(self, event: StreamEvent) -> str:
        event_id = self._numbers.next_id(self._events.num_tokens, finished=event["type"] == "message_stop")
        return "" if event_id is None else f"id: {event_id}\nevent: {event['type']}\ndata: {to_json(event)}\n\n"


class WholeMessage:
    """Collects all updates, then returns the whole body."""

    def __init__(self, prepared: Prepared, receipt_key: ReceiptKey | None = None) -> None:
        self._events = MessageEvents(prepared, receipt_key)
        self._so_far: list[StreamEvent] = []

    def add(self, _prompt_index: int, update: GenerationUpdate) -> None:
        self._so_far.extend(self._events.of(update))

    def body(self) -> Message:
        """Raises InternalError when the output has not finished."""
        *events, ending, _ = [*self._so_far, *self._events.end()]
        message: Message = events[0]["message"]
        message["content"] = _content(events)
        message["stop_reason"] = ending["delta"]["stop_reason"]
        message["stop_sequence"] = ending["delta"]["stop_sequence"]
        message["usage"] = ending["usage"]
        if "receipt" in ending:
            message["receipt"] = ending["receipt"]
        return message


def _content(events: Iterable[StreamEvent]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    texts: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            texts.append([])
        elif event["type"] == "content_block_delta":
            _, text = event["delta"].values()
            texts[-1].append(text)
    for block, parts in zip(blocks, texts, strict=True):
        joined = "".join(parts)
        if block["type"] == "tool_use":
            block["input"] = _input(joined)
        else:
            block[block["type"]] = joined
    return blocks


def _input(text: str) -> dict[str, Any]:
    """Returns arguments as an object, as Anthropic requires; {} if max_tokens has cut them or they are no object."""
    try:
        value = strict_json(text, "arguments")
    except InvalidRequest:
        return {}
    return value if isinstance(value, dict) else {}
