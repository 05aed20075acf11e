"""The HTTP server's routes: path, method, what answers it, and what the OpenAPI document says of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter

from outrider.gateway.anthropic.errors import MessagesErrorAnswer
from outrider.gateway.anthropic.message_answer import CountTokensAnswer, Message
from outrider.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from outrider.gateway.fleet.view import FleetView
from outrider.gateway.openai.answer_types import (
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    ErrorAnswer,
    LoadAnswer,
    ModelCard,
    ModelList,
    ReadyAnswer,
    TokenizeAnswer,
    VerifiedReceipt,
    VersionAnswer,
)
from outrider.gateway.openai.chat_batch import BATCH_SCHEMA
from outrider.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from outrider.gateway.responses.response_types import DeletedResponse, ItemList, ResponseBody
from outrider.gateway.responses.schema import ResponsesRequest
from outrider.gateway.servers.http.generations import Generations
from outrider.gateway.servers.http.limits import Endpoint, guarded
from outrider.gateway.servers.http.openapi import json_body
from outrider.gateway.servers.http.queries import Queries
from outrider.gateway.servers.http.receipts import ANSWER_SCHEMA, Receipts
from outrider.gateway.servers.http.stored_responses import StoredResponses


@dataclass(frozen=True)
class Endpoints:
    """The handlers behind the routes."""

    generations: Generations
    stored: StoredResponses
    queries: Queries
    receipts: Receipts


def add_routes(router: APIRouter, endpoints: Endpoints, *, shows_tokenizer: bool) -> None:
    generations, stored, queries = endpoints.generations, endpoints.stored, endpoints.queries
    completion, chat = json_body(CompletionRequest), json_body(ChatCompletionRequest)
    _post(router, "/v1/completions", generations.completions, Completion, completion, "Complete a prompt")
    _post(router, "/v1/chat/completions", generations.chat_completions, ChatCompletion, chat, "Answer a chat")
    batch = {"requestBody": {"required": True, "content": {"application/json": {"schema": BATCH_SCHEMA}}}}
    _post(router, "/v1/chat/completions/batch", generations.chat_batch, ChatCompletion, batch, "Answer several chats")
    either = json_body(CompletionRequest, ChatCompletionRequest)
    _post(router, "/invocations", generations.invocations, Completion | ChatCompletion, either, "Either, for SageMaker")
    response = json_body(ResponsesRequest)
    _post(router, "/v1/responses", generations.responses, ResponseBody, response, "Answer items with items")
    path = "/v1/responses/{response_id}"
    _get(router, path, generations.response, ResponseBody, "A stored response, or one in the background")
    _get(
        router, f"{path}/cancel", stored.cancel, ResponseBody, "Cancel a response in the background", methods=("POST",)
    )
    _get(router, path, stored.delete, DeletedResponse, "Delete a stored response", methods=("DELETE",))
    _get(router, f"{path}/input_items", stored.input_items, ItemList, "The input of a stored response")
    message, counted, error = json_body(MessagesRequest), json_body(CountTokensRequest), MessagesErrorAnswer
    _post(router, "/v1/messages", generations.messages, Message, message, "Answer a conversation", error)
    count = "Count the tokens of a prompt"
    _post(router, "/v1/messages/count_tokens", queries.count_tokens, CountTokensAnswer, counted, count, error)
    _get(
        router, "/v1/streams/{request_id:path}", generations.stream, None, "The rest of a stream, as server-sent events"
    )
    answer = {"requestBody": {"required": True, "content": {"application/json": {"schema": ANSWER_SCHEMA}}}}
    verify = endpoints.receipts.verify
    _post(router, "/v1/receipts/verify", verify, VerifiedReceipt, answer, "Draw the tokens of an answer again")
    tokenize = json_body(TokenizeRequest, TokenizeChatRequest)
    _post(router, "/tokenize", queries.tokenize, TokenizeAnswer, tokenize, "Text or messages to token ids")
    if shows_tokenizer:
        _get(router, "/tokenizer_info", queries.tokenizer_info, dict[str, Any], "The tokenizer's configuration")
    detokenize = json_body(DetokenizeRequest)
    _post(router, "/detokenize", queries.detokenize, DetokenizeAnswer, detokenize, "Token ids to text")
    _get(router, "/v1/models", queries.models, ModelList, "The served model")
    _get(router, "/v1/models/{model_id:path}", queries.model, ModelCard, "One model")
    _get(router, "/health", queries.health, None, "200 while the process runs")
    _get(router, "/ping", queries.health, None, "As /health", methods=("GET", "POST"))
    _get(router, "/ready", queries.ready, ReadyAnswer, "200 when requests can be served, else 503 with the reason")
    _get(router, "/readyz", queries.ready, ReadyAnswer, "As /ready")
    _get(router, "/version", queries.version, VersionAnswer, "The version of the server")
    _get(router, "/load", queries.load, LoadAnswer, "How many requests are being generated")
    _get(router, "/fleet", queries.fleet, FleetView, "The verifiers and drafters, as seen by this gateway")
    _get(router, "/metrics", queries.metrics, None, "Prometheus metrics")


def _post(
    router: APIRouter,
    path: str,
    endpoint: Endpoint,
    answer: Any,
    body: dict[str, Any],
    summary: str,
    error: Any = ErrorAnswer,
) -> None:
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": error} for status in (400, 401, 404, 408, 409, 413, 429, 500, 503, 504)
    }
    router.add_api_route(
        path,
        guarded(endpoint),
        methods=["POST"],
        response_model=None,
        responses={200: {"model": answer, "description": "Or server-sent events, with stream"}, **errors},
        openapi_extra=body,
        summary=summary,
        operation_id=_operation_id(path, "post"),
    )


def _get(
    router: APIRouter, path: str, endpoint: Endpoint, answer: Any, summary: str, methods: Sequence[str] = ("GET",)
) -> None:
    responses: dict[int | str, dict[str, Any]] = {200: {"model": answer} if answer is not None else {}}
    for method in methods:
        router.add_api_route(
            path,
            guarded(endpoint),
            methods=[method],
            response_model=None,
            responses=responses,
            summary=summary,
            operation_id=_operation_id(path, method),
        )


def _operation_id(path: str, method: str) -> str:
    words = path.replace("{", "").replace(":path}", "").strip("/").replace("/", "_")
    return f"{method.lower()}_{words}"
