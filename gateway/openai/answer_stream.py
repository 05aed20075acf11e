"""Turns updates of the generation into server-sent events, from the start or from a client's last event.

Not here: the form of a choice (answer_body.py), sending events (servers/http/http_answer.py).
"""

from __future__ import annotations

from typing import Any

from outrider.gateway.openai.answer_body import AnswerShape, to_json
from outrider.gateway.openai.answer_types import ChatChunkChoice, CompletionChoice, ErrorAnswer
from outrider.gateway.openai.usage import AnswerSettings
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.event_cursor import NOTHING_SEEN, EventCursor, Seen
from outrider.gateway.request.types import GenerationUpdate
from outrider.gateway.tool_calls.chat_parts import ChatParts


class AnswerStream:
    """The bytes of each update's events. After the last update, call `end()`; after an error, `failed()`.

    Updates whose events the client has `seen` count but send nothing, so the rest is byte for byte what would have
    followed. Every event has an id, which says how far the stream has come (request/event_cursor.py).
    """

    def __init__(self, prepared: Prepared, settings: AnswerSettings, seen: EventCursor = NOTHING_SEEN) -> None:
        self._shape = AnswerShape(prepared, settings)
        options = prepared.options
        head = to_json(self._shape.head("chat.completion.chunk" if options.chat else "text_completion"))
        self._head = head[:-1]
        self._offsets: dict[int, int] = {}
        self._outputs: dict[int, ChatParts | None] = {}
        self._seen = seen
        self._reached: list[Seen | None] = list(seen.choices)

    def events(self, prompt_index: int, update: GenerationUpdate) -> bytes:
        """Returns an update's events: none for tokens whose text is held back, unless the tokens are requested."""
        account = self._shape.account
        index = account.add(prompt_index, update)
        seen = self._seen.of(index)
        events = ""
        if index not in self._offsets:
            self._offsets[index] = len(self._shape.echo_text(prompt_index))
            opening = self._opening(index, prompt_index, update) if seen is None else None
            if opening is not None:
                events += self._event(opening, index, Seen())
        delta = self._delta(index, update) if self._shape.options.chat else None
        finished = update.finish_reason is not None
        reached = Seen(update.base_len + len(update.token_ids), finished, epoch=update.epoch)
        if self._worth_an_event(update, delta) and not _covers(seen, reached):
            choice = self._choice(index, update, delta)
            usage = account.choice_usage(prompt_index, index) if self._shape.options.continuous_usage else None
            fields = {"choices": [choice], **({"usage": usage} if usage is not None else {})}
            events += self._event(fields, index, reached)
        self._offsets[index] += sum(map(len, update.token_texts))
        return events.encode()

    def _delta(self, index: int, update: GenerationUpdate) -> dict[str, Any]:
        """Returns an update's delta. Takes every update, seen or not: the parser needs the text from its beginning."""
        if index not in self._outputs:
            self._outputs[index] = self._shape.chat_output(index)
        output = self._outputs[index]
        if output is not None:
            return output.delta(update.text, update.finish_reason)
        return {"content": update.text} if update.text else {}

    def _worth_an_event(self, update: GenerationUpdate, delta: dict[str, Any] | None) -> bool:
        options = self._shape.options
        if update.finish_reason is not None:
            return True
        if options.drop_output:
            return False
        wants_tokens = options.num_logprobs is not None or self._shape.annotated
        return bool(update.text if delta is None else delta) or (wants_tokens and bool(update.token_ids))

    def _choice(
        self, index: int, update: GenerationUpdate, delta: dict[str, Any] | None
    ) -> CompletionChoice | ChatChunkChoice:
        if delta is None:
            return self._shape.completion_choice(index, update, self._offsets[index])
        choice: Any = self._shape.chat_parts(index, update)
        choice["delta"] = delta
        output = self._outputs[index]
        if output is not None:
            choice["finish_reason"] = output.finish_reason(choice["finish_reason"], update.stop_reason)
        answer: ChatChunkChoice = choice
        return answer

    def _opening(self, index: int, prompt_index: int, update: GenerationUpdate) -> dict[str, Any] | None:
        """Returns a choice's first event: the echoed text, in a chat after the role."""
        options = self._shape.options
        choice: Any = {"index": index, "logprobs": None, "finish_reason": None, "stop_reason": None}
        event: dict[str, Any] = {"choices": [choice]}
        if options.chat:
            choice["delta"] = {"role": "assistant", "content": self._shape.echo_text(prompt_index)}
        else:
            choice["text"] = self._shape.echo_text(prompt_index)
            choice["logprobs"] = self._shape.echo(prompt_index, update.prompt_logprobs)
        if options.return_token_ids:
            choice["token_ids"] = []
            holder = event if options.chat else choice
            holder["prompt_token_ids"] = list(self._shape.prompt(prompt_index))
        elif not options.chat and options.echo_texts is None:
            return None
        if options.continuous_usage:
            event["usage"] = self._shape.account.prompt_usage(prompt_index)
        return event

    def _event(self, fields: dict[str, Any], index: int, reached: Seen) -> str:
        self._reached += [None] * (index + 1 - len(self._reached))
        self._reached[index] = reached
        return self._numbered(fields, EventCursor(tuple(self._reached)))

    def _numbered(self, fields: dict[str, Any], cursor: EventCursor) -> str:
        return f"id: {self._shape.options.answer_id}:{cursor}\ndata: {self._head},{to_json(fields)[1:]}\n\n"

    def end(self) -> bytes:
        """Returns the usage and the receipt, if requested, and the end mark. Raises InternalError when a choice has
        not finished.
        """
        account, options = self._shape.account, self._shape.options
        account.check_finished()
        events = ""
        if (options.include_usage or options.receipt) and not self._seen.ended:
            fields: dict[str, Any] = {"choices": []}
            if options.include_usage:
                fields["usage"] = account.usage()
                metrics = account.metrics()
                if metrics is not None:
                    fields["metrics"] = metrics
            fields.update(account.receipt())
            events = self._numbered(fields, EventCursor(tuple(self._reached), ended=True))
        return (events + "data: [DONE]\n\n").encode()

    def failed(self, error: ErrorAnswer) -> bytes:
        return f"data: {to_json(error)}\n\n".encode()


def _covers(seen: Seen | None, reached: Seen) -> bool:
    """Returns whether the client, at `seen`, has the event that ends at `reached`."""
    if seen is None:
        return False
    return seen.finished or (not reached.finished and reached.num_tokens <= seen.num_tokens)
