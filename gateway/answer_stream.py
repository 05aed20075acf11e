"""Updates of the generation to server-sent events, from the beginning or from where a client has got to.

Not here: what a choice looks like (responses.py), how events are sent (generation_response.py).
"""

from __future__ import annotations

from typing import Any

from gateway.event_cursor import NOTHING_SEEN, EventCursor, Seen
from gateway.openai_convert import Prepared
from gateway.requests import GenerationUpdate
from gateway.response_types import ChatChunkChoice, CompletionChoice
from gateway.responses import AnswerShape, to_json
from gateway.service import SpecMetricsLevel
from gateway.tokenizer import Tokenizer


class AnswerStream:
    """Each update to the bytes of its events. After the last update, `end()`; after an error, nothing.

    Updates whose events are among those `seen` make none, but count; so the rest is, to the byte, what would have
    followed. Every event has an id, which says how far the stream is with it (event_cursor.py).
    """

    def __init__(
        self,
        prepared: Prepared,
        tokenizer: Tokenizer,
        level: SpecMetricsLevel,
        version: str,
        seen: EventCursor = NOTHING_SEEN,
    ) -> None:
        self._shape = AnswerShape(prepared, tokenizer, level, version)
        options = prepared.options
        head = to_json(self._shape.head("chat.completion.chunk" if options.chat else "text_completion"))
        self._head = head[:-1]
        self._offsets: dict[int, int] = {}
        self._seen = seen
        self._reached: list[Seen | None] = list(seen.choices)

    def events(self, prompt_index: int, update: GenerationUpdate) -> bytes:
        """May be empty: tokens whose text is held back, when the caller did not ask for the tokens themselves."""
        account = self._shape.account
        account.add(prompt_index, update)
        index = account.choice(prompt_index, update)
        seen = self._seen.of(index)
        events = ""
        if index not in self._offsets:
            self._offsets[index] = len(self._shape.echo_text(prompt_index))
            opening = self._opening(index, prompt_index, update) if seen is None else None
            if opening is not None:
                events += self._event(opening, index, Seen())
        finished = update.finish_reason is not None
        reached = Seen(update.base_len + len(update.token_ids), finished)
        if self._worth_an_event(update) and not _covers(seen, reached):
            choice = self._choice(index, update)
            usage = account.choice_usage(prompt_index, index) if self._shape.options.continuous_usage else None
            fields = {"choices": [choice], **({"usage": usage} if usage is not None else {})}
            events += self._event(fields, index, reached)
        self._offsets[index] += sum(map(len, update.token_texts))
        return events.encode()

    def _worth_an_event(self, update: GenerationUpdate) -> bool:
        options = self._shape.options
        if update.finish_reason is not None:
            return True
        if options.drop_output:
            return False
        wants_tokens = options.num_logprobs is not None or self._shape.annotated
        return bool(update.text) or (wants_tokens and bool(update.token_ids))

    def _choice(self, index: int, update: GenerationUpdate) -> CompletionChoice | ChatChunkChoice:
        if not self._shape.options.chat:
            return self._shape.completion_choice(index, update, self._offsets[index])
        choice: Any = self._shape.chat_parts(index, update)
        choice["delta"] = {"content": update.text} if update.text else {}
        answer: ChatChunkChoice = choice
        return answer

    def _opening(self, index: int, prompt_index: int, update: GenerationUpdate) -> dict[str, Any] | None:
        """The first event of a choice: the role in a chat, the echoed prompt in a completion."""
        options = self._shape.options
        choice: Any = {"index": index, "logprobs": None, "finish_reason": None, "stop_reason": None}
        event: dict[str, Any] = {"choices": [choice]}
        if options.chat:
            choice["delta"] = {"role": "assistant", "content": ""}
        else:
            choice["text"] = self._shape.echo_text(prompt_index)
            choice["logprobs"] = self._shape.echo(prompt_index, update.prompt_logprobs)
        if options.return_token_ids:
            holder = event if options.chat else choice
            holder["prompt_token_ids"] = list(self._shape.prompt(prompt_index))
        elif not options.chat and options.echo_texts is None:
            return None
        return event

    def _event(self, fields: dict[str, Any], index: int, reached: Seen) -> str:
        self._reached += [None] * (index + 1 - len(self._reached))
        self._reached[index] = reached
        return self._numbered(fields, EventCursor(tuple(self._reached)))

    def _numbered(self, fields: dict[str, Any], cursor: EventCursor) -> str:
        return f"id: {self._shape.options.answer_id}:{cursor}\ndata: {self._head},{to_json(fields)[1:]}\n\n"

    def end(self) -> bytes:
        """The usage, if asked for, and the end mark. Raises InternalError when a choice has not finished."""
        account = self._shape.account
        account.check_finished()
        events = ""
        if self._shape.options.include_usage and not self._seen.ended:
            fields: dict[str, Any] = {"choices": [], "usage": account.usage()}
            metrics = account.metrics()
            if metrics is not None:
                fields["metrics"] = metrics
            events = self._numbered(fields, EventCursor(tuple(self._reached), ended=True))
        return (events + "data: [DONE]\n\n").encode()


def _covers(seen: Seen | None, reached: Seen) -> bool:
    """Whether the event that reaches so far has been seen."""
    if seen is None:
        return False
    return seen.finished or (not reached.finished and reached.num_tokens <= seen.num_tokens)
