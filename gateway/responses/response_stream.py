"""Turns updates of the generation into a response, whole or as server-sent events.

An event's id says how many tokens and which event the stream has come to (request/event_cursor.py). Not here: the items
of the output (output_items.py), sending events (servers/http/http_answer.py).
"""

from __future__ import annotations

import json
from typing import Any

from outrider.gateway.openai.answer_body import to_json
from outrider.gateway.openai.answer_types import ChatTokenLogprob, CompletionTokensDetails, ErrorAnswer
from outrider.gateway.openai.logprobs import chat_logprobs
from outrider.gateway.openai.usage import Account, AnswerSettings
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.event_cursor import NOTHING_SEEN, EventCursor, EventNumbers
from outrider.gateway.request.types import GenerationUpdate
from outrider.gateway.responses.output_items import OutputItems, ResponseEvent
from outrider.gateway.responses.response_types import ResponseBody, ResponseUsage
from outrider.shared.errors import InternalError
from outrider.shared.messages import FinishReason


class WholeResponse:
    """Builds the body of a response. Pass every update to `add`, then take the `body`."""

    def __init__(self, prepared: Prepared, settings: AnswerSettings) -> None:
        if prepared.options.response is None:
            raise InternalError("a response without its plan")
        self.options = prepared.options
        self._fields = json.loads(prepared.options.response.fields)
        self._tokenizer = settings.tokenizer
        self._account = Account(prepared, settings.level, settings.receipt_key)
        self._items = OutputItems(prepared.options)
        self._finish: FinishReason | None = None

    def add(self, prompt_index: int, update: GenerationUpdate) -> list[tuple[int, ResponseEvent]]:
        """Returns the update's events, each with the number of tokens that it took."""
        self._account.add(prompt_index, update)
        events: list[tuple[int, ResponseEvent]] = []
        for place, text in enumerate(update.token_texts):
            pushed = self._items.push(text, self._logprobs(update, place))
            events += [(update.base_len + place + 1, event) for event in pushed]
        if update.finish_reason is not None:
            self._finish = update.finish_reason
            # An unfinished character, which no token's text has.
            rest = update.text[sum(map(len, update.token_texts)) :]
            ended = self._items.push(rest) + self._items.finish(is_complete=self._finish is FinishReason.STOP)
            events += [(update.base_len + len(update.token_ids), event) for event in ended]
        return events

    def _logprobs(self, update: GenerationUpdate, place: int) -> list[ChatTokenLogprob]:
        num_top = self.options.num_logprobs
        if num_top is None:
            return []
        token_ids, entries = update.token_ids[place : place + 1], update.logprobs[place : place + 1]
        as_ids = self.options.return_tokens_as_token_ids
        return chat_logprobs(self._tokenizer, token_ids, entries, num_top, as_ids=as_ids)["content"]

    def body(self) -> ResponseBody:
        """Raises InternalError when the output has not finished."""
        self._account.check_finished()
        body = self.so_far("completed")
        if self._finish is FinishReason.LENGTH:
            body["status"], body["incomplete_details"] = "incomplete", {"reason": "max_output_tokens"}
        elif self._finish is not FinishReason.STOP:
            body["status"], body["error"] = "failed", {"code": "server_error", "message": "the generation was aborted"}
        body["usage"] = self._usage()
        metrics = self._account.metrics()
        if metrics is not None:
            body["metrics"] = metrics
        if self._finish in (FinishReason.STOP, FinishReason.LENGTH):
            body.update(self._account.receipt())  # type: ignore[typeddict-item]
        return body

    def so_far(self, status: str) -> ResponseBody:
        options = self.options
        body: ResponseBody = {
            "id": options.answer_id,
            "object": "response",
            "created_at": options.created,
            "status": status,
            "model": options.model,
            "output": list(self._items.items),
            "error": None,
            "incomplete_details": None,
            "usage": None,
        }
        body.update(self._fields)
        return body

    def _usage(self) -> ResponseUsage:
        usage = self._account.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        no_details: CompletionTokensDetails = {"reasoning_tokens": 0}
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage.get("completion_tokens_details", no_details),
            "total_tokens": usage["total_tokens"],
        }


class ResponseStream:
    """The bytes of each update's events. After the last update, call `end()`; after an error, `failed()`.

    Events that the client has `seen` are made and numbered like the others, but not sent.
    """

    def __init__(self, prepared: Prepared, settings: AnswerSettings, seen: EventCursor = NOTHING_SEEN) -> None:
        self._whole = WholeResponse(prepared, settings)
        self._numbers = EventNumbers(prepared.options.answer_id, seen)
        self._num_tokens = 0

    def events(self, prompt_index: int, update: GenerationUpdate) -> bytes:
        events = ""
        self._numbers.take(update.base_len + len(update.token_ids), update.epoch)
        if self._numbers.count == 0:
            for kind in ("created", "in_progress"):
                body = self._whole.so_far("in_progress")
                events += self._numbered({"type": f"response.{kind}", "response": body})
        for num_tokens, event in self._whole.add(prompt_index, update):
            self._num_tokens = num_tokens
            events += self._numbered(event)
        self._num_tokens = update.base_len + len(update.token_ids)
        return events.encode()

    def body(self) -> ResponseBody:
        """Raises InternalError when the output has not finished."""
        return self._whole.body()

    def end(self) -> bytes:
        """Raises InternalError when the output has not finished."""
        body = self.body()
        return self._numbered({"type": f"response.{body['status']}", "response": body}, finished=True).encode()

    def failed(self, error: ErrorAnswer) -> bytes:
        """Returns the failure's event, without an id: a client that continues the stream starts at the event before."""
        body = self._whole.so_far("failed")
        body["error"] = {"code": "server_error", "message": error["error"]["message"]}
        return _sse({"type": "response.failed", "sequence_number": self._numbers.count, "response": body}).encode()

    def _numbered(self, event: dict[str, Any], *, finished: bool = False) -> str:
        number = self._numbers.count
        event_id = self._numbers.next_id(self._num_tokens, finished=finished)
        return "" if event_id is None else _sse({**event, "sequence_number": number}, f"id: {event_id}\n")


def _sse(event: dict[str, Any], event_id: str = "") -> str:
    return f"event: {event['type']}\n{event_id}data: {to_json(event)}\n\n"
