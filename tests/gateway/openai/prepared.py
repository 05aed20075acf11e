"""Bodies of completions and chats, as the requests that the gateway makes of them."""

from __future__ import annotations

from typing import Any

from outrider.gateway.openai.convert import prepare_chat, prepare_completion
from outrider.gateway.openai.schema import ChatCompletionRequest, CompletionRequest, parse_body
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.served import Served
from outrider.gateway.request.types import ValidRequest

USER = [{"role": "user", "content": "hi"}]


def completion(served: Served, **body: Any) -> Prepared:
    return prepare_completion(parse_body(CompletionRequest, {"prompt": "Hello", **body}), served)


def chat(served: Served, **body: Any) -> Prepared:
    return prepare_chat(parse_body(ChatCompletionRequest, {"messages": USER, **body}), served)


def one(prepared: Prepared) -> ValidRequest:
    [request] = prepared.requests
    return request
