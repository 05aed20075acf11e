"""Turns prompts and sampling parameters into ValidRequests, with the OpenAI API's checks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypedDict

from outrider.gateway.openai.checks import check_prompt_chars
from outrider.gateway.openai.convert import chat_token_ids, prepare_completion
from outrider.gateway.openai.schema import ChatFields, CompletionRequest, parse_body
from outrider.gateway.request.answers import AnswerKind
from outrider.gateway.request.record import new_record
from outrider.gateway.request.served import Served
from outrider.gateway.request.types import ChoiceStart, NoLog, ValidRequest
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import SamplingParams, StructuredOutputsParams, speculation_fields
from outrider.shared.sampling_params import stream_key

_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt"}


class TextPrompt(TypedDict, total=False):
    """A prompt as text; vLLM's name for it."""

    prompt: str
    cache_salt: str


class TokensPrompt(TypedDict, total=False):
    """A prompt as token ids; vLLM's name for it."""

    prompt_token_ids: list[int]
    prompt: str
    cache_salt: str


@dataclass(frozen=True)
class Prompt:
    """A prompt as given: text, token ids, or chat messages with options of their template."""

    given: object
    chat: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class PreparedPrompt:
    """text: None where token ids were given."""

    request: ValidRequest
    text: str | None


class Preparation:
    """seed: source of the seeds of requests without one; None: fresh noise."""

    def __init__(self, served: Served, seed: int | None) -> None:
        self._served = served
        self._seed = seed
        self._counter = itertools.count()

    def next_number(self) -> int:
        """Returns the number of a request; vLLM's ids of requests are these."""
        return next(self._counter)

    def prepare(
        self, number: int, prompt: Prompt, params: SamplingParams, request_id: str | None = None
    ) -> PreparedPrompt:
        """Checks a request and gives it its seed. request_id None: its number. Raises InvalidRequest that names the
        field.
        """
        request_id = str(number) if request_id is None else request_id
        text, token_ids, further = self._tokens(prompt)
        body: dict[str, Any] = {**_body(params), **further, "prompt": token_ids, "request_id": request_id}
        body["max_tokens"] = _max_tokens(params, len(token_ids), self._served.model.max_model_len)
        if self._seed is not None and params.seed is None:
            body["seed"] = stream_key(self._seed, (number,), 0)
        prepared = prepare_completion(parse_body(CompletionRequest, body), self._served)
        record = new_record(AnswerKind.COMPLETION, prepared)
        starts = tuple(
            ChoiceStart(index, record.modes[0], key, NoLog()) for index, key in enumerate(record.stream_keys[0])
        )
        return PreparedPrompt(replace(prepared.requests[0], request_id=request_id, starts=starts), text)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int], dict[str, Any]]:
        tokenizer, given = self._served.tokenizer, prompt.given
        if prompt.chat is not None:
            fields = parse_body(ChatFields, {**prompt.chat, "messages": given})
            token_ids = chat_token_ids(fields, tokenizer, self._served.model)
            return tokenizer.decode(token_ids, skip_special_tokens=False), token_ids, {}
        further: dict[str, Any] = {}
        if isinstance(given, Mapping):
            unknown = {key for key, value in given.items() if value is not None} - _PROMPT_KEYS
            if unknown:
                raise InvalidRequest(f"prompt: {sorted(unknown)[0]!r} is not supported", param="prompt")
            if given.get("cache_salt") is not None:  # else that of the parameters
                further = {"cache_salt": given["cache_salt"]}
            given = given["prompt_token_ids"] if "prompt_token_ids" in given else given.get("prompt")
        if isinstance(given, str):
            check_prompt_chars(given, tokenizer, self._served.model, "prompt")
            return given, tokenizer.encode(given), further
        if not isinstance(given, Sequence):
            raise InvalidRequest(
                "a prompt must be text, {'prompt': text} or {'prompt_token_ids': [...]}", param="prompt"
            )
        return None, list(given), further


def _body(params: SamplingParams) -> dict[str, Any]:
    """Fields of the /v1/completions body. Raises InvalidRequest for an unknown extra argument."""
    body = {entry.name: getattr(params, entry.name) for entry in fields(params)}
    del body["extra_args"], body["output_kind"]
    body["speculation"] = speculation_fields(params) or None
    body["cache_salt"] = params.cache_salt or None
    body["prediction"] = {"type": "content", "content": params.prediction} if params.prediction else None
    structured = params.structured_outputs
    if isinstance(structured, StructuredOutputsParams):
        body["structured_outputs"] = {entry.name: getattr(structured, entry.name) for entry in fields(structured)}
    return body


def _max_tokens(params: SamplingParams, prompt_len: int, max_model_len: int) -> Any:
    """The requested number, limited to the context's room; a non-number is left for the API's checks to refuse."""
    asked: Any = params.max_tokens
    limit: Any = params.truncate_prompt_tokens
    if not all(value is None or isinstance(value, int) for value in (asked, limit)):
        return asked
    if limit is not None:
        prompt_len = min(prompt_len, max_model_len - (asked or 1) if limit == -1 else limit)
    room = max(1, max_model_len - prompt_len)
    return room if asked is None else min(asked, room)
