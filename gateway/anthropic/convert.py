"""A message's request as a chat's: the same checks, prompt, grammar and parser."""

from __future__ import annotations

import json
import re
from typing import Any

from outrider.gateway.anthropic.schema import CountTokensRequest, MessagesRequest, OutputConfig, Thinking
from outrider.gateway.openai.checks import check_grammar, check_model, check_stop
from outrider.gateway.openai.convert import chat_token_ids, prepare_chat
from outrider.gateway.openai.schema import ChatCompletionRequest, ChatFields, parse_body
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.served import Served
from outrider.gateway.tool_calls.formats import NONE, output_format
from outrider.gateway.tool_calls.reasoning import can_bound
from outrider.shared.errors import InvalidRequest, PromptTooLong

# Fields that both have, with the same meaning.
_SHARED = {
    "model",
    "max_tokens",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "request_id",
    "speculation",
    "receipt",
}
_THINKING_TYPES = ("enabled", "adaptive", "disabled")
# The variables that tell templates whether to think; attributes and strings of the same name are none.
_SWITCH = re.compile(r"(?<![\w.'\"])(enable_)?thinking(?![\w'\"])")


def prepare_message(body: MessagesRequest, served: Served) -> Prepared:
    """Raises InvalidRequest or UnknownModel."""
    check_stop(body.stop_sequences, served.limits, "stop_sequences")
    if body.speculation is not None and body.speculation.annotate:
        raise InvalidRequest("speculation.annotate is not supported; use /v1/chat/completions", param="speculation")
    chat = body.model_dump(include=_SHARED, exclude_unset=True)
    chat.update(_prompt_fields(body, served))
    chat["stop"] = body.stop_sequences
    if body.tool_choice is not None:
        chat["tool_choice"] = body.tool_choice.tool_choice
        chat["parallel_tool_calls"] = body.tool_choice.parallel
    if body.thinking is not None:
        chat["include_reasoning"] = body.thinking.display != "omitted"
        chat["thinking_token_budget"] = _budget(body.thinking, served)
    if body.output_config is not None and body.output_config.format is not None:
        chat["response_format"] = _response_format(body.output_config.format, served)
    try:
        return prepare_chat(parse_body(ChatCompletionRequest, chat), served, id_prefix="msg_", as_message=True)
    except PromptTooLong as error:  # in the words by which Claude Code knows that it must compact
        told = f"prompt is too long: {error.num_tokens} tokens > {served.model.max_model_len} maximum"
        raise InvalidRequest(told, param="messages") from None


def count_tokens(body: CountTokensRequest, served: Served) -> int:
    """Raises InvalidRequest or UnknownModel."""
    check_model(body.model, served.model)
    chat = parse_body(ChatFields, _prompt_fields(body, served))
    return len(chat_token_ids(chat, served.tokenizer))


def _prompt_fields(body: CountTokensRequest, served: Served) -> dict[str, Any]:
    messages = list(body.messages)
    last = messages[-1]
    continues = last["role"] == "assistant"
    if continues and last.get("tool_calls"):
        raise InvalidRequest("messages: the last tool_use has no tool_result after it", param="messages")
    if body.system:
        messages.insert(0, {"role": "system", "content": body.system})
    return {
        "messages": messages,
        "tools": body.tools,
        "continue_final_message": continues,
        "add_generation_prompt": not continues,
        "chat_template_kwargs": {**_effort(body.output_config), **_thinking(body.thinking, served)},
    }


def _effort(output_config: OutputConfig | None) -> dict[str, Any]:
    effort = output_config.effort if output_config is not None else None
    return {} if effort is None else {"reasoning_effort": effort}


def _thinking(thinking: Thinking | None, served: Served) -> dict[str, bool]:
    """Returns the template's variables; none if the field is unset, or asks a model without reasoning to think."""
    if thinking is None:
        return {}
    if thinking.type not in _THINKING_TYPES:
        raise InvalidRequest(f"thinking.type must be one of {', '.join(_THINKING_TYPES)}", param="thinking.type")
    if thinking.display not in (None, "summarized", "omitted"):
        raise InvalidRequest("thinking.display must be summarized or omitted", param="thinking.display")
    thinks = served.model.reasoning_parser != NONE
    enable = thinking.type != "disabled"
    if _SWITCH.search(served.tokenizer.chat_template_source or ""):
        return {"enable_thinking": enable, "thinking": enable} if thinks or not enable else {}
    if thinks and not enable:
        raise InvalidRequest("thinking: the served model's chat template cannot turn it off", param="thinking")
    return {}


def _budget(thinking: Thinking, served: Served) -> int | None:
    """Returns the thinking budget; None if unset, or if it cannot be enforced: then only max_tokens bounds it."""
    budget = thinking.budget_tokens
    if thinking.type != "enabled" or budget is None:
        return None
    if budget < 0:
        raise InvalidRequest(f"thinking.budget_tokens must be at least 0, got {budget}", param="thinking.budget_tokens")
    row = output_format(served.model.reasoning_parser, NONE).reasoning
    return budget if can_bound(row, served.tokenizer.control_tokens) else None


def _response_format(given: dict[str, Any], served: Served) -> dict[str, Any]:
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise InvalidRequest(
            'output_config.format must be {"type": "json_schema", "schema": {...}}', param="output_config.format"
        )
    check_grammar(json.dumps(given["schema"]), served.model, served.limits, "output_config.format")
    return {"type": "json_schema", "json_schema": {"schema": given["schema"]}}
