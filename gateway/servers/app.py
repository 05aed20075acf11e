"""The HTTP server's application: OpenAI's endpoints, Anthropic's Messages, vLLM's helpers, health and metrics.

The entry point is `create_app(service)`. Not here: what a body means (openai/convert.py), the form of answers
(openai/responses.py), sending them (generation_response.py), decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.anthropic.convert import count_tokens, prepare_message
from outrider.gateway.anthropic.errors import MessagesErrorAnswer
from outrider.gateway.anthropic.message_answer import CountTokensAnswer, Message
from outrider.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from outrider.gateway.fleet.view import FleetView
from outrider.gateway.openai.chat_batch import BATCH_SCHEMA, prepare_chat_batch
from outrider.gateway.openai.convert import prepare_chat, prepare_completion
from outrider.gateway.openai.response_types import (
    ChatCompletion,
    Completion,
    DetokenizeAnswer,
    ErrorAnswer,
    LoadAnswer,
    ModelCard,
    ModelList,
    ReadyAnswer,
    TokenizeAnswer,
    VersionAnswer,
)
from outrider.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    parse_body,
)
from outrider.gateway.openai.tokenization import detokenize, tokenize, tokenizer_info
from outrider.gateway.playground.page import add_playground
from outrider.gateway.request.event_cursor import LAST_EVENT_ID, NOTHING_SEEN, EventCursor, parse_event_id
from outrider.gateway.request.served import Served, ServedModel
from outrider.gateway.request.types import AnswerKind, Prepared, Wanted
from outrider.gateway.responses.as_chat import prepare_response
from outrider.gateway.responses.response_types import DeletedResponse, ItemList, ResponseBody
from outrider.gateway.responses.schema import ResponsesRequest
from outrider.gateway.servers.admission import Admission
from outrider.gateway.servers.auth import caller_of, owner_of
from outrider.gateway.servers.body_budget import ANSWER_RATIO, INLINE_BYTES, BodyBudget, Held
from outrider.gateway.servers.generation_response import GenerationResponse, Load
from outrider.gateway.servers.http_admission import HttpAdmission
from outrider.gateway.servers.http_limits import (
    Endpoint,
    as_outrider_error,
    error_response,
    guarded,
    parse_json,
    read_body,
    status_error_response,
)
from outrider.gateway.servers.long_json import LongJson
from outrider.gateway.servers.openapi import RouteWithoutSchemas, install_openapi, json_body
from outrider.gateway.servers.quotas import metered
from outrider.gateway.servers.request_label import HEADER as REQUEST_LABEL_HEADER
from outrider.gateway.servers.request_label import RequestLabel
from outrider.gateway.servers.service import GatewayService
from outrider.gateway.servers.stored_responses import StoredResponses, events_seen
from outrider.shared.errors import InvalidRequest, UnknownModel
from outrider.shared.tracing import carrier_of

# texts; tokenized inline, about 2 ms
_MAX_TEXTS = 64

T = TypeVar("T")


def create_app(
    service: GatewayService,
    *,
    cors_origins: Sequence[str] = (),
    admission: Admission | None = None,
    api_docs: bool = True,
    playground: bool = True,
    shows_tokenizer: bool = False,
) -> FastAPI:
    """The application; serve it with uvicorn. CORS is off unless origins are given ("*" for all).

    Without `admission`, no key is required and nothing is limited. `api_docs`: /docs and /openapi.json;
    `playground`: the page at /; `shows_tokenizer`: /tokenizer_info.
    """
    app = FastAPI(
        title="Outrider",
        summary="Lossless speculative decoding behind the OpenAI API",
        version=service.version,
        docs_url="/docs" if api_docs else None,
        openapi_url="/openapi.json" if api_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    endpoints = _Endpoints(service, BodyBudget() if admission is None else admission.bodies)
    app.router.route_class = RouteWithoutSchemas
    _add_routes(app.router, endpoints, shows_tokenizer)
    if playground:
        add_playground(app)
    install_openapi(app, lambda router: _add_routes(router, endpoints, shows_tokenizer))
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(Exception, _unexpected_error)
    if admission is not None:
        app.add_middleware(HttpAdmission, admission=admission)
    app.add_middleware(RequestLabel)  # outside of admission: refusals have the label too
    if cors_origins:  # outermost: a browser must see refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_LABEL_HEADER],
        )
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(as_outrider_error(error), request.url.path)
    if error.status_code == 404:
        message = f"no such endpoint: {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    else:
        message = str(error.detail)
    return status_error_response(error.status_code, message, request.url.path, error.headers)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return error_response(as_outrider_error(error), request.url.path)


class _Endpoints:
    def __init__(self, service: GatewayService, bodies: BodyBudget) -> None:
        self._service = service
        self._bodies = bodies
        self._load = Load()
        self.stored = StoredResponses(service, bodies, self._load)

    def _served(self) -> Served:
        return Served(self._service.model, self._service.tokenizer, self._service.limits)

    async def _parsed(self, request: Request, work: Callable[[object], T], answer_ratio: int = 0) -> T:
        """Applies `work` to the body's JSON; long bodies are parsed and processed on a thread, a few at a time, so that
        streams keep flowing. answer_ratio: the answer's bytes per byte of the body, for which room is kept.
        """
        with closing(caller_of(request).held or Held(self._bodies)) as held:
            body = await read_body(request, self._service.limits.max_body_bytes, held)
            held.add_body(answer_ratio * len(body))
            if len(body) <= INLINE_BYTES and not _has_many_texts(parsed := parse_json(body)):
                return work(parsed)
            return await self._bodies.on_thread(lambda: work(parse_json(body)), len(body))

    async def _answered(self, request: Request, work: Callable[[object], Mapping[str, object]]) -> Response:
        """`work` on the body's JSON, as JSON; a long answer counts until it is sent."""
        answer = await self._parsed(request, lambda body: LongJson(work(body)), ANSWER_RATIO)
        if (held := caller_of(request).held) is not None:
            held.add_answer(len(answer.body))
        return answer

    async def completions(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.COMPLETION):
            return resumed
        served = self._served()
        prepared = await self._parsed(
            request, lambda body: prepare_completion(parse_body(CompletionRequest, body), served)
        )
        return self._begun(request, AnswerKind.COMPLETION, prepared)

    async def chat_completions(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.CHAT):
            return resumed
        served = self._served()
        prepared = await self._parsed(
            request, lambda body: prepare_chat(parse_body(ChatCompletionRequest, body), served)
        )
        return self._begun(request, AnswerKind.CHAT, prepared)

    async def chat_batch(self, request: Request) -> Response:
        served = self._served()
        prepared = await self._parsed(request, lambda body: prepare_chat_batch(body, served))
        return self._begun(request, AnswerKind.CHAT, prepared)

    async def invocations(self, request: Request) -> Response:
        """The one door of SageMaker: what the body is decides what answers."""
        served = self._served()

        def prepared(body: object) -> Prepared:
            if isinstance(body, dict) and "messages" in body:
                return prepare_chat(parse_body(ChatCompletionRequest, body), served)
            return prepare_completion(parse_body(CompletionRequest, body), served)

        answer = await self._parsed(request, prepared)
        return self._begun(request, AnswerKind.CHAT if answer.options.chat else AnswerKind.COMPLETION, answer)

    async def responses(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.RESPONSE):
            return resumed
        served, can_store = self._served(), self._service.responses is not None

        def prepared_or_body(body: object) -> Prepared | ResponsesRequest:
            parsed = parse_body(ResponsesRequest, body)
            follows = parsed.previous_response_id is not None
            return parsed if follows else prepare_response(parsed, served, can_store=can_store)

        prepared = await self._parsed(request, prepared_or_body)
        if isinstance(prepared, ResponsesRequest):
            prepared = await self.stored.following(request, prepared, served)
        if prepared.in_background:
            return await self.stored.begun(request, self._begin(request, AnswerKind.RESPONSE, prepared))
        return self._begun(request, AnswerKind.RESPONSE, prepared)

    async def response(self, request: Request) -> Response:
        """Stored or running; with ?stream=true its events."""
        seen = events_seen(request.query_params)
        if seen is None:
            return await self.stored.response(request)
        return await self._rest_of(request, request.path_params["response_id"], seen, AnswerKind.RESPONSE)

    async def messages(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.MESSAGE):
            return resumed
        served = self._served()
        prepared = await self._parsed(request, lambda body: prepare_message(parse_body(MessagesRequest, body), served))
        return self._begun(request, AnswerKind.MESSAGE, prepared)

    async def count_tokens(self, request: Request) -> Response:
        served = self._served()
        return await self._answered(
            request, lambda body: {"input_tokens": count_tokens(parse_body(CountTokensRequest, body), served)}
        )

    def _begin(self, request: Request, kind: AnswerKind, prepared: Prepared) -> Prepared:
        owned = replace(prepared.owned_by(owner_of(request)), carrier=carrier_of(request.headers.items()))
        return self._service.begin(kind, owned)

    def _begun(self, request: Request, kind: AnswerKind, prepared: Prepared) -> Response:
        begun = self._begin(request, kind, prepared)
        return GenerationResponse(metered(self._service, caller_of(request).account), begun, self._load)

    async def _resumed(self, request: Request, kind: AnswerKind) -> Response | None:
        """The rest of an earlier answer, if the client sends its last event's id; None for a new request."""
        last_event_id = request.headers.get(LAST_EVENT_ID)
        if not last_event_id:
            return None
        request_id, seen = parse_event_id(last_event_id)
        return await self._rest_of(request, request_id, seen, kind)

    async def stream(self, request: Request) -> Response:
        """The rest of an answer of any kind; without a last event, all of it."""
        request_id, last_event_id = request.path_params["request_id"], request.headers.get(LAST_EVENT_ID)
        if not last_event_id:
            return await self._rest_of(request, request_id, NOTHING_SEEN, None)
        named, seen = parse_event_id(last_event_id)
        if named != request_id:
            raise InvalidRequest(f"{LAST_EVENT_ID} does not belong to the request in the path", param=LAST_EVENT_ID)
        return await self._rest_of(request, request_id, seen, None)

    async def _rest_of(self, request: Request, request_id: str, seen: EventCursor, kind: AnswerKind | None) -> Response:
        carrier = carrier_of(request.headers.items())
        wanted = Wanted(request_id, owner_of(request), seen.by_choice(), kind, carrier=carrier)
        prepared = await self._service.resume(wanted)
        if prepared.in_background:
            return await self.stored.rest_of(request, prepared, seen)
        return GenerationResponse(metered(self._service, caller_of(request).account), prepared, self._load, seen=seen)

    async def tokenize(self, request: Request) -> Response:
        served = self._served()
        return await self._answered(request, lambda body: tokenize(body, served))

    async def detokenize(self, request: Request) -> Response:
        served = self._served()
        return await self._answered(request, lambda body: detokenize(body, served))

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(tokenizer_info(self._service.tokenizer))

    async def models(self, request: Request) -> Response:
        answer: ModelList = {"object": "list", "data": [_model_card(self._service.model)]}
        return JSONResponse(answer)

    async def model(self, request: Request) -> Response:
        model, name = self._service.model, request.path_params["model_id"]
        if name != model.name:
            raise UnknownModel(f"model {name[:200]!r} is not served; the served model is {model.name!r}", param="model")
        return JSONResponse(_model_card(model))

    async def health(self, request: Request) -> Response:
        """The process is alive; whether it can serve is /ready."""
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        state = self._service.ready()
        if state.ready:
            return JSONResponse({"ready": True, **({"warning": state.warning} if state.warning else {})})
        return JSONResponse({"ready": False, "reason": state.reason}, status_code=503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._service.version})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.render_metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._load.num_running})

    async def fleet(self, request: Request) -> Response:
        return JSONResponse(self._service.fleet())


def _has_many_texts(body: object) -> bool:
    """Whether it has more texts to tokenize than streams should wait for: about 0.03 ms each, however short."""
    if not isinstance(body, dict):
        return False
    lists, messages = [body.get(name) for name in ("bad_words", "prompt")], body.get("messages")
    if isinstance(messages, list) and len(messages) > 1 and isinstance(messages[0], list):
        return True  # several conversations, each with a template to fill in
    return any(isinstance(texts, list) and sum(isinstance(text, str) for text in texts) > _MAX_TEXTS for texts in lists)


def _model_card(model: ServedModel) -> ModelCard:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "outrider",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "draft_methods": list(model.draft_methods),
    }


def _add_routes(router: APIRouter, endpoints: _Endpoints, shows_tokenizer: bool) -> None:
    completion, chat = json_body(CompletionRequest), json_body(ChatCompletionRequest)
    _post(router, "/v1/completions", endpoints.completions, Completion, completion, "Complete a prompt")
    _post(router, "/v1/chat/completions", endpoints.chat_completions, ChatCompletion, chat, "Answer a chat")
    batch = {"requestBody": {"required": True, "content": {"application/json": {"schema": BATCH_SCHEMA}}}}
    _post(router, "/v1/chat/completions/batch", endpoints.chat_batch, ChatCompletion, batch, "Answer several chats")
    either = json_body(CompletionRequest, ChatCompletionRequest)
    _post(router, "/invocations", endpoints.invocations, Completion | ChatCompletion, either, "Either, for SageMaker")
    response = json_body(ResponsesRequest)
    _post(router, "/v1/responses", endpoints.responses, ResponseBody, response, "Answer items with items")
    path, stored = "/v1/responses/{response_id}", endpoints.stored
    _get(router, path, endpoints.response, ResponseBody, "A stored response, or one in the background")
    _get(
        router, f"{path}/cancel", stored.cancel, ResponseBody, "Cancel a response in the background", methods=("POST",)
    )
    _get(router, path, stored.delete, DeletedResponse, "Delete a stored response", methods=("DELETE",))
    _get(router, f"{path}/input_items", stored.input_items, ItemList, "The input of a stored response")
    message, counted, error = json_body(MessagesRequest), json_body(CountTokensRequest), MessagesErrorAnswer
    _post(router, "/v1/messages", endpoints.messages, Message, message, "Answer a conversation", error)
    count = "Count the tokens of a prompt"
    _post(router, "/v1/messages/count_tokens", endpoints.count_tokens, CountTokensAnswer, counted, count, error)
    _get(router, "/v1/streams/{request_id:path}", endpoints.stream, None, "The rest of a stream, as server-sent events")
    tokenize = json_body(TokenizeRequest, TokenizeChatRequest)
    _post(router, "/tokenize", endpoints.tokenize, TokenizeAnswer, tokenize, "Text or messages to token ids")
    if shows_tokenizer:
        _get(router, "/tokenizer_info", endpoints.tokenizer_info, dict[str, Any], "The tokenizer's configuration")
    detokenize = json_body(DetokenizeRequest)
    _post(router, "/detokenize", endpoints.detokenize, DetokenizeAnswer, detokenize, "Token ids to text")
    _get(router, "/v1/models", endpoints.models, ModelList, "The served model")
    _get(router, "/v1/models/{model_id:path}", endpoints.model, ModelCard, "One model")
    _get(router, "/health", endpoints.health, None, "200 while the process runs")
    _get(router, "/ping", endpoints.health, None, "As /health", methods=("GET", "POST"))
    _get(router, "/ready", endpoints.ready, ReadyAnswer, "200 when requests can be served, else 503 with the reason")
    _get(router, "/readyz", endpoints.ready, ReadyAnswer, "As /ready")
    _get(router, "/version", endpoints.version, VersionAnswer, "The version of the server")
    _get(router, "/load", endpoints.load, LoadAnswer, "How many requests are being generated")
    _get(router, "/fleet", endpoints.fleet, FleetView, "The verifiers and drafters, as seen by this gateway")
    _get(router, "/metrics", endpoints.metrics, None, "Prometheus metrics")


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
