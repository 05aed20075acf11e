"""A response's request as a chat's: the same checks, prompt, grammar and parser, under the names of /v1/responses."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from outrider.gateway.openai.answer_body import to_json
from outrider.gateway.openai.convert import prepare_chat
from outrider.gateway.openai.schema import ChatCompletionRequest, parse_body
from outrider.gateway.request.answers import Prepared, ResponsePlan
from outrider.gateway.request.served import Served
from outrider.gateway.responses.input_items import Item, chat_messages, tools_in
from outrider.gateway.responses.schema import ResponsesRequest
from outrider.gateway.responses.stored import with_ids
from outrider.gateway.responses.tools import chat_choice, chat_tools, served_tools
from outrider.shared.errors import InvalidRequest

# Fields that both have, with the same meaning.
_SHARED = ResponsesRequest.model_fields.keys() & ChatCompletionRequest.model_fields.keys() - {
    "tools",
    "tool_choice",
    "top_logprobs",
}
_LOGPROBS = "message.output_text.logprobs"
# entries, characters of a name and of a value; OpenAI's limits
_MAX_METADATA, _MAX_METADATA_NAME, _MAX_METADATA_VALUE = 16, 64, 512
# A chat's names in error messages, and those of a response.
_NAMES = (
    (re.compile(r"\bresponse_format(\.json_schema)?"), "text.format"),
    (re.compile(r"\bmax_(completion_)?tokens\b"), "max_output_tokens"),
    (re.compile(r"\breasoning_effort\b"), "reasoning.effort"),
    (re.compile(r"\bmessages\b[.\w]*"), "input"),
    (re.compile(r"\bfunction\.(?=\w)"), ""),
)


def prepare_response(
    body: ResponsesRequest, served: Served, earlier: Sequence[Item] = (), *, can_store: bool = False
) -> Prepared:
    """Validates a request by way of a chat. earlier: the conversation before the input. can_store: whether the gateway
    stores responses.

    Raises InvalidRequest or UnknownModel.
    """
    if body.store and not can_store:
        raise InvalidRequest(
            "store: this gateway stores no responses; start it with --stored-response-ttl-s, or send false",
            param="store",
        )
    stores = can_store if body.store is None else body.store
    if body.background and not stores:
        what_to_do = "leave store out" if can_store else "start the gateway with --stored-response-ttl-s"
        raise InvalidRequest(f"background can only be used when `store` is true: {what_to_do}", param="background")
    if body.background and body.request_id is not None:
        raise InvalidRequest("request_id: a response in the background has an id of its own", param="request_id")
    items = (*earlier, *body.input)
    body = body.model_copy(update={"tools": _all_tools(body.tools, items)})
    _check_metadata(body.metadata or {})
    if body.speculation is not None and body.speculation.annotate:
        raise InvalidRequest(
            "speculation.annotate is not supported here; use /v1/chat/completions", param="speculation"
        )
    with _names_of_a_response():
        chat = parse_body(ChatCompletionRequest, _chat(body, items))
        prepared = prepare_chat(chat, served, id_prefix="resp_")
    kept = to_json(with_ids(items, prepared.options.answer_id)) if stores else ""
    plan = ResponsePlan(to_json(_repeated_fields(body, prepared, stores)), kept)
    return replace(prepared, options=replace(prepared.options, response=plan))


@contextmanager
def _names_of_a_response() -> Iterator[None]:
    try:
        yield
    except InvalidRequest as error:
        message, param = error.message, error.param
        for chat_name, name in _NAMES:
            message, param = chat_name.sub(name, message), param and chat_name.sub(name, param)
        raise type(error)(message, param=param) from None


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > _MAX_METADATA:
        raise InvalidRequest(f"metadata has {len(metadata)} entries, the most is {_MAX_METADATA}", param="metadata")
    for name, value in metadata.items():
        if len(name) > _MAX_METADATA_NAME or not isinstance(value, str) or len(value) > _MAX_METADATA_VALUE:
            raise InvalidRequest(
                f"metadata must have names of at most {_MAX_METADATA_NAME} and strings of at most "
                f"{_MAX_METADATA_VALUE} characters, which {name[:80]!r} has not",
                param="metadata",
            )


def _all_tools(tools: object, items: Sequence[Item]) -> object:
    """Returns the tools with those that the conversation brings; one declared again replaces the earlier one."""
    brought = tools_in(items)
    if not brought or not isinstance(tools, list | tuple):
        return tools
    names = {tool.get("name") for tool in brought if isinstance(tool, dict) and isinstance(tool.get("name"), str)}
    kept = [tool for tool in tools if not (isinstance(tool, dict) and str(tool.get("name")) in names)]
    return [*kept, *{json.dumps(tool.get("name")) if isinstance(tool, dict) else "": tool for tool in brought}.values()]


def _chat(body: ResponsesRequest, items: Sequence[Item]) -> dict[str, Any]:
    """Returns the body of the chat, as JSON."""
    chat = body.model_dump(include=set(_SHARED), exclude_unset=True, by_alias=True)
    chat["messages"] = chat_messages(body.instructions, items)
    chat["tools"] = chat_tools(body.tools)
    chat["tool_choice"] = chat_choice(body.tool_choice)
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["logprobs"] = _LOGPROBS in body.include or body.top_logprobs is not None
    chat["top_logprobs"] = body.top_logprobs
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning is not None else None
    if body.text is not None and body.text.format is not None:
        chat["response_format"] = _response_format(body.text.format)
    return chat


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(given.get("type"), str):
        raise InvalidRequest("text.format must have a type", param="text.format")
    if given["type"] != "json_schema":
        return {"type": given["type"]}
    return {"type": "json_schema", "json_schema": {name: entry for name, entry in given.items() if name != "type"}}


def _repeated_fields(body: ResponsesRequest, prepared: Prepared, stores: bool) -> dict[str, Any]:
    """Returns the request's fields that OpenAI's answers repeat."""
    params = prepared.requests[0].sampling_params
    return {
        "background": body.background,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.effort if body.reasoning is not None else None, "summary": None},
        "store": stores,
        "temperature": params.temperature,
        "text": {"format": (body.text and body.text.format) or {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": [_with_defaults(tool) for tool in served_tools(body.tools)],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": body.truncation,
    }


def _with_defaults(tool: Any) -> dict[str, Any]:
    return {"strict": False, "parameters": None, **tool} if tool.get("type") == "function" else tool
