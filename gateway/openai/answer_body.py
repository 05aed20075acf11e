"""Turns updates of the generation into the JSON of answers: the shared parts, and `WholeAnswer` for one body.

Not here: server-sent events (answer_stream.py), HTTP (servers/app.py), what a field means (convert.py).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from outrider.gateway.openai.answer_types import (
    Annotation,
    ChatChoice,
    ChatCompletion,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    RoundAnnotation,
)
from outrider.gateway.openai.logprobs import (
    chat_logprobs,
    completion_logprobs,
    echo_logprobs,
    join_completion_logprobs,
    prompt_logprobs,
)
from outrider.gateway.openai.usage import Account, AnswerSettings
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.types import GenerationUpdate, Round
from outrider.gateway.tool_calls.chat_parts import ChatParts
from outrider.gateway.tool_calls.symbols import Symbols
from outrider.shared.messages import FinishReason, TokenLogprob, TokenOrigin

_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ABORT: "abort"}
_ORIGIN = {origin: origin.name.lower() for origin in TokenOrigin}
# Some clients split events at these characters, though the standard allows only CR and LF.
_LINE_BREAKS = {0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"}


def to_json(value: object) -> str:
    """Returns compact JSON; raises ValueError on NaN, which JSON does not have."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text if text.isascii() else text.translate(_LINE_BREAKS)


def merge_updates(updates: Sequence[GenerationUpdate]) -> GenerationUpdate:
    """Merges all updates of one choice into one."""
    first, last = updates[0], updates[-1]
    return GenerationUpdate(
        choice_index=first.choice_index,
        base_len=first.base_len,
        token_ids=tuple(token_id for update in updates for token_id in update.token_ids),
        text="".join(update.text for update in updates),
        token_texts=tuple(text for update in updates for text in update.token_texts),
        origins=tuple(origin for update in updates for origin in update.origins),
        logprobs=tuple(entry for update in updates for entry in update.logprobs),
        prompt_logprobs=next((update.prompt_logprobs for update in updates if update.prompt_logprobs), ()),
        rounds=tuple(one for update in updates for one in update.rounds),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
    )


class AnswerShape:
    """The parts of one choice that whole and streamed answers share."""

    def __init__(self, prepared: Prepared, settings: AnswerSettings) -> None:
        self.prepared = prepared
        self.options = prepared.options
        self.tokenizer = settings.tokenizer
        self.account = Account(prepared, settings.level, settings.receipt_key)
        plan = self.options.output
        self._symbols = plan.symbols() if plan is not None else Symbols(())
        self._num_named = len(prepared.requests[0].sampling_params.logprob_token_ids)
        self.fingerprint = f"outrider-{settings.version}"

    def head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.options.answer_id,
            "object": kind,
            "created": self.options.created,
            "model": self.options.model,
            "system_fingerprint": self.fingerprint,
        }

    def prompt(self, prompt_index: int) -> tuple[int, ...]:
        return self.prepared.requests[prompt_index].prompt_token_ids

    def echo_text(self, prompt_index: int) -> str:
        texts = self.options.echo_texts
        return texts[prompt_index] if texts is not None else ""

    def echo(self, prompt_index: int, entries: Sequence[TokenLogprob]) -> CompletionLogprobs | None:
        """Returns the prompt's log-probabilities, if both echo and logprobs are set."""
        if self.options.echo_texts is None or self.options.num_logprobs is None:
            return None
        prompt, text = self.prompt(prompt_index), self.echo_text(prompt_index)
        as_ids = self.options.return_tokens_as_token_ids
        return echo_logprobs(self.tokenizer, prompt, text, entries, self.options.num_logprobs, as_ids=as_ids)

    def completion_choice(self, index: int, update: GenerationUpdate, text_offset: int) -> CompletionChoice:
        options = self.options
        choice: CompletionChoice = {
            "index": index,
            "text": "" if options.drop_output else update.text,
            "logprobs": None,
            "finish_reason": _finish(update),
            "stop_reason": update.stop_reason,
        }
        if options.drop_output:
            choice["finish_reason"], choice["stop_reason"] = "length", None
        elif options.num_logprobs is not None and update.token_ids:
            choice["logprobs"] = completion_logprobs(
                self.tokenizer,
                update.token_ids,
                update.token_texts,
                update.logprobs,
                self._num_named or options.num_logprobs,
                text_offset,
                as_ids=options.return_tokens_as_token_ids,
            )
        if options.return_token_ids:
            choice["token_ids"] = [] if options.drop_output else list(update.token_ids)
        if self.annotated:
            choice["outrider"] = self.annotation(update)
        return choice

    @property
    def annotated(self) -> bool:
        return (self.options.annotate or self.options.return_token_ids) and not self.options.drop_output

    def annotation(self, update: GenerationUpdate) -> Annotation:
        return {
            "origins": [_ORIGIN[origin] for origin in update.origins],
            "token_ids": list(update.token_ids),
            "token_texts": [self._symbols.show(text) for text in update.token_texts],
            "rounds": [_round(one) for one in update.rounds],
        }

    def chat_output(self, index: int) -> ChatParts | None:
        """Returns what separates a choice's reasoning and tool calls from its text; None: all is text."""
        options = self.options
        return ChatParts(options.output, options.answer_id, options.created, index) if options.output else None

    def chat_parts(self, index: int, update: GenerationUpdate) -> dict[str, Any]:
        """Returns a chat choice without its message or delta."""
        options = self.options
        parts: dict[str, Any] = {
            "index": index,
            "logprobs": None,
            "finish_reason": _finish(update),
            "stop_reason": update.stop_reason,
        }
        if options.num_logprobs is not None and update.token_ids:
            parts["logprobs"] = chat_logprobs(
                self.tokenizer,
                update.token_ids,
                update.logprobs,
                options.num_logprobs,
                as_ids=options.return_tokens_as_token_ids,
                named=self._num_named > 0,
            )
        if options.return_token_ids:
            parts["token_ids"] = list(update.token_ids)
        if self.annotated:
            parts["outrider"] = self.annotation(update)
        return parts


def _round(one: Round) -> RoundAnnotation:
    return {
        "index": one.index,
        "base_len": one.base_len,
        "num_tokens": one.num_tokens,
        "num_draft_tokens": one.num_draft_tokens,
        "num_accepted_tokens": one.num_accepted_tokens,
        "method": one.method,
        "drafter": one.drafter,
    }


def _finish(update: GenerationUpdate) -> str | None:
    return _FINISH[update.finish_reason] if update.finish_reason is not None else None


class WholeAnswer:
    """Collects all updates, then returns the whole body."""

    def __init__(self, prepared: Prepared, settings: AnswerSettings) -> None:
        self._shape = AnswerShape(prepared, settings)
        self._updates: dict[int, list[GenerationUpdate]] = {}

    def add(self, prompt_index: int, update: GenerationUpdate) -> None:
        choice = self._shape.account.add(prompt_index, update)
        self._updates.setdefault(choice, []).append(update)

    def body(self) -> Completion | ChatCompletion:
        """Raises InternalError when a choice has not finished."""
        account = self._shape.account
        account.check_finished()
        chat = self._shape.options.chat
        body: Any = self._shape.head("chat.completion" if chat else "text_completion")
        merged = {index: merge_updates(updates) for index, updates in sorted(self._updates.items())}
        make = self._chat_choice if chat else self._completion_choice
        body["choices"] = [make(index, update) for index, update in merged.items()]
        body["usage"] = account.usage()
        metrics = account.metrics()
        if metrics is not None:
            body["metrics"] = metrics
        if chat:
            self._add_prompt(body, merged[0])
        body.update(account.receipt())
        answer: Completion | ChatCompletion = body
        return answer

    def _prompt_index(self, choice: int) -> int:
        return choice // self._shape.prepared.requests[0].n

    def _completion_choice(self, index: int, update: GenerationUpdate) -> CompletionChoice:
        prompt_index = self._prompt_index(index)
        echo_text = self._shape.echo_text(prompt_index)
        choice = self._shape.completion_choice(index, update, len(echo_text))
        choice["text"] = echo_text + choice["text"]
        echo = self._shape.echo(prompt_index, update.prompt_logprobs)
        if echo is not None:
            own = choice["logprobs"]
            choice["logprobs"] = echo if own is None else join_completion_logprobs(echo, own)
        self._add_prompt(choice, update)
        return choice

    def _add_prompt(self, target: Any, update: GenerationUpdate) -> None:
        """Adds the prompt's token ids and log-probabilities: to the choice for completions, at the top level for chat.
        Null if not requested, as in vLLM, and for a batch of chats.
        """
        options, tokenizer = self._shape.options, self._shape.tokenizer
        if options.chat and len(self._shape.prepared.requests) > 1:
            target["prompt_token_ids"], target["prompt_logprobs"] = None, None
            return
        prompt = self._shape.prompt(0 if options.chat else self._prompt_index(target["index"]))
        shown = prompt_logprobs(tokenizer, prompt, update.prompt_logprobs) if options.prompt_logprobs else None
        target["prompt_token_ids"] = list(prompt) if options.return_token_ids else None
        target["prompt_logprobs"] = shown
        if not options.chat:
            target.setdefault("token_ids", None)

    def _chat_choice(self, index: int, update: GenerationUpdate) -> ChatChoice:
        choice: Any = self._shape.chat_parts(index, update)
        output = self._shape.chat_output(index)
        if output is None:
            choice["message"] = {"role": "assistant", "content": update.text}
        else:
            choice["message"] = output.message(update.text, update.finish_reason)
            choice["finish_reason"] = output.finish_reason(choice["finish_reason"], update.stop_reason)
        if echo_text := self._shape.echo_text(self._prompt_index(index)):
            choice["message"]["content"] = echo_text + (choice["message"]["content"] or "")
        choice.setdefault("token_ids", None)
        answer: ChatChoice = choice
        return answer
