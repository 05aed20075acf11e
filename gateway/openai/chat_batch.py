"""vLLM's /v1/chat/completions/batch: several conversations in one request, one choice for each.

`messages` is a list of conversations, all other fields are those of a chat and hold for each. As in vLLM there are no
tools, no streams, and one output a conversation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outrider.gateway.openai.convert import prepare_chat
from outrider.gateway.openai.fields import json_kind
from outrider.gateway.openai.messages import MESSAGES_SCHEMA
from outrider.gateway.openai.schema import ChatCompletionRequest, parse_body
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.served import Served
from outrider.shared.errors import InvalidRequest

# Fields of a chat that a batch does not take, with the values that have no effect.
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "n": (1,),
    "tools": ([],),
    "prompt_logprobs": (),
}
# Schema of the request body in the OpenAPI document.
BATCH_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["messages"],
    "description": "The other fields are those of ChatCompletionRequest, but for "
    + ", ".join(f"`{name}`" for name in _UNSUPPORTED),
    "properties": {"messages": {"type": "array", "minItems": 1, "items": MESSAGES_SCHEMA}},
}


def prepare_chat_batch(body: object, served: Served) -> Prepared:
    """Raises InvalidRequest or UnknownModel."""
    fields, conversations = _parts(body, served.limits.max_sequences)
    chats = []
    for place, messages in enumerate(conversations):
        try:
            chat = parse_body(ChatCompletionRequest, {**fields, "messages": messages})
            chats.append(prepare_chat(chat, served))
        except InvalidRequest as error:
            if error.param == "messages":
                raise InvalidRequest(f"conversation {place}: {error}", param="messages") from None
            raise
    plans = {chat.options.output for chat in chats}
    if len(plans) > 1:
        raise InvalidRequest(
            "messages: some conversations have begun the reasoning and some have not; send them in separate requests",
            param="messages",
        )
    options = chats[0].options
    if options.echo_texts is not None:
        options = replace(options, echo_texts=tuple(text for chat in chats for text in chat.options.echo_texts or ()))
    requests = tuple(
        replace(request, request_id=f"{options.answer_id}-{place}" if len(chats) > 1 else options.answer_id)
        for place, chat in enumerate(chats)
        for request in chat.requests
    )
    return replace(chats[0], requests=requests, options=options)


def _parts(body: object, max_conversations: int) -> tuple[dict[str, Any], list[Any]]:
    """Returns the fields that all conversations share, and the conversations."""
    if not isinstance(body, dict):
        raise InvalidRequest(f"the body must be an object, got {json_kind(body)}")
    for name, harmless in _UNSUPPORTED.items():
        value = body.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in harmless):
            raise InvalidRequest(f"{name} is not supported in a batch", param=name)
    conversations = body.get("messages")
    if not isinstance(conversations, list) or not conversations:
        raise InvalidRequest("messages must be a list of at least one conversation", param="messages")
    if len(conversations) > max_conversations:
        raise InvalidRequest(
            f"messages has {len(conversations)} conversations, the most is {max_conversations}", param="messages"
        )
    return body, conversations
