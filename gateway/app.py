"""The REST door: OpenAI's endpoints, vLLM's helpers around them, health and metrics.

`create_app(service)` is all there is to call. Not here: what a body means (openai_convert.py), how an answer looks
(responses.py), how it is sent (generation_response.py), the decoding itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.admission import Admission
from gateway.auth import caller_of, owner_of
from gateway.event_cursor import LAST_EVENT_ID, NOTHING_SEEN, EventCursor, parse_event_id
from gateway.fleet_view import FleetView
from gateway.generation_response import GenerationResponse, Load
from gateway.http_admission import HttpAdmission
from gateway.http_limits import (
    Endpoint,
    as_outrider_error,
    error_response,
    guarded,
    parse_json,
    read_body,
    status_error_response,
)
from gateway.openai_convert import Prepared, Served, chat_token_ids, prepare_chat, prepare_completion
from gateway.openai_schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
    parse_body,
)
from gateway.openapi import install_openapi, json_body
from gateway.playground.page import add_playground
from gateway.quotas import metered
from gateway.request_checks import check_model, check_token_ids
from gateway.request_start import Wanted
from gateway.response_types import (
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
from gateway.service import GatewayService, ServedModel
from gateway.session_record import AnswerKind
from shared.errors import InvalidRequest, UnknownModel
from shared.tracing import carrier_of

# Parsing and tokenizing this much takes about a millisecond; more is done on a thread, so that streams go on.
_INLINE_BYTES = 32 * 1024

T = TypeVar("T")


def create_app(
    service: GatewayService,
    *,
    cors_origins: Sequence[str] = (),
    admission: Admission | None = None,
    api_docs: bool = True,
    playground: bool = True,
) -> FastAPI:
    """The application; serve it with uvicorn. CORS is off unless origins are named ("*" for all).

    Without `admission` nobody is asked for a key and nothing is bounded. `api_docs`: /docs and /openapi.json;
    `playground`: the page at /.
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
    endpoints = _Endpoints(service)
    _add_routes(app, endpoints)
    if playground:
        add_playground(app)
    install_openapi(app)
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(Exception, _unexpected_error)
    if admission is not None:
        app.add_middleware(HttpAdmission, admission=admission)
    if cors_origins:  # outermost: a browser must see refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id"],
        )
    return app


async def _routing_error(request: Request, error: Exception) -> Response:
    if not isinstance(error, HTTPException):
        return error_response(as_outrider_error(error))
    if error.status_code == 404:
        message = f"no such endpoint: {request.url.path}"
    elif error.status_code == 405:
        message = f"{request.method} is not allowed on {request.url.path}"
    else:
        message = str(error.detail)
    return status_error_response(error.status_code, message, error.headers)


async def _unexpected_error(request: Request, error: Exception) -> Response:
    return error_response(as_outrider_error(error))


class _Endpoints:
    def __init__(self, service: GatewayService) -> None:
        self._service = service
        self._load = Load()

    def _served(self) -> Served:
        return Served(self._service.model, self._service.tokenizer, self._service.limits)

    async def _parsed(self, request: Request, work: Callable[[object], T]) -> T:
        """`work` on the body's JSON; both leave the event loop when the body is long."""
        body = await read_body(request, self._service.limits.max_body_bytes)
        if len(body) <= _INLINE_BYTES:
            return work(parse_json(body))
        return await asyncio.to_thread(lambda: work(parse_json(body)))

    async def completions(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.COMPLETION):
            return resumed
        served, header_id = self._served(), request.headers.get("x-request-id")
        prepared = await self._parsed(
            request, lambda body: prepare_completion(parse_body(CompletionRequest, body), served, header_id)
        )
        return self._begun(request, AnswerKind.COMPLETION, prepared)

    async def chat_completions(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.CHAT):
            return resumed
        served, header_id = self._served(), request.headers.get("x-request-id")
        prepared = await self._parsed(
            request, lambda body: prepare_chat(parse_body(ChatCompletionRequest, body), served, header_id)
        )
        return self._begun(request, AnswerKind.CHAT, prepared)

    def _begun(self, request: Request, kind: AnswerKind, prepared: Prepared) -> Response:
        owned = replace(prepared.owned_by(owner_of(request)), carrier=carrier_of(request.headers.items()))
        begun = self._service.begin(kind, owned)
        return GenerationResponse(metered(self._service, caller_of(request).account), begun, self._load)

    async def _resumed(self, request: Request, kind: AnswerKind) -> Response | None:
        """The rest of an earlier answer, when the client names its last event; None for a new request."""
        last_event_id = request.headers.get(LAST_EVENT_ID)
        if not last_event_id:
            return None
        request_id, seen = parse_event_id(last_event_id)
        return await self._rest_of(request, request_id, seen, kind)

    async def stream(self, request: Request) -> Response:
        """The rest of an answer of any kind; all of it without a last event."""
        request_id, last_event_id = request.path_params["request_id"], request.headers.get(LAST_EVENT_ID)
        if not last_event_id:
            return await self._rest_of(request, request_id, NOTHING_SEEN, None)
        named, seen = parse_event_id(last_event_id)
        if named != request_id:
            raise InvalidRequest(f"{LAST_EVENT_ID} is not of the request in the path", param=LAST_EVENT_ID)
        return await self._rest_of(request, request_id, seen, None)

    async def _rest_of(self, request: Request, request_id: str, seen: EventCursor, kind: AnswerKind | None) -> Response:
        carrier = carrier_of(request.headers.items())
        wanted = Wanted(request_id, owner_of(request), seen.by_choice(), kind, carrier=carrier)
        prepared = await self._service.resume(wanted)
        return GenerationResponse(metered(self._service, caller_of(request).account), prepared, self._load, seen=seen)

    async def tokenize(self, request: Request) -> Response:
        served = self._served()
        return JSONResponse(await self._parsed(request, lambda body: _tokenize(body, served)))

    async def detokenize(self, request: Request) -> Response:
        served = self._served()
        return JSONResponse(await self._parsed(request, lambda body: _detokenize(body, served)))

    async def models(self, request: Request) -> Response:
        answer: ModelList = {"object": "list", "data": [_model_card(self._service.model)]}
        return JSONResponse(answer)

    async def model(self, request: Request) -> Response:
        model, name = self._service.model, request.path_params["model_id"]
        if name != model.name:
            raise UnknownModel(f"model {name[:200]!r} is not served, the model here is {model.name!r}", param="model")
        return JSONResponse(_model_card(model))

    async def health(self, request: Request) -> Response:
        """The process is alive; whether it can serve is /ready."""
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        state = self._service.ready()
        if state.ready:
            return JSONResponse({"ready": True})
        return JSONResponse({"ready": False, "reason": state.reason}, status_code=503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": self._service.version})

    async def metrics(self, request: Request) -> Response:
        return Response(self._service.render_metrics(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def load(self, request: Request) -> Response:
        return JSONResponse({"server_load": self._load.num_running})

    async def fleet(self, request: Request) -> Response:
        return JSONResponse(self._service.fleet())


def _tokenize(body: object, served: Served) -> TokenizeAnswer:
    if isinstance(body, dict) and "messages" in body:
        chat = parse_body(TokenizeChatRequest, body)
        check_model(chat.model, served.model)
        token_ids, with_strings = chat_token_ids(chat, served.tokenizer), chat.return_token_strs
    else:
        text = parse_body(TokenizeRequest, body)
        check_model(text.model, served.model)
        token_ids = served.tokenizer.encode(text.prompt, text.add_special_tokens)
        with_strings = text.return_token_strs
    strings = [served.tokenizer.token_string(token_id) for token_id in token_ids] if with_strings else None
    return {
        "count": len(token_ids),
        "max_model_len": served.model.max_model_len,
        "tokens": token_ids,
        "token_strs": strings,
    }


def _detokenize(body: object, served: Served) -> DetokenizeAnswer:
    asked = parse_body(DetokenizeRequest, body)
    check_model(asked.model, served.model)
    check_token_ids(asked.tokens, served.model, "tokens")
    return {"prompt": served.tokenizer.decode(asked.tokens, asked.skip_special_tokens)}


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


def _add_routes(app: FastAPI, endpoints: _Endpoints) -> None:
    completion, chat = json_body(CompletionRequest), json_body(ChatCompletionRequest)
    _post(app, "/v1/completions", endpoints.completions, Completion, completion, "Complete a prompt")
    _post(app, "/v1/chat/completions", endpoints.chat_completions, ChatCompletion, chat, "Answer a chat")
    _get(app, "/v1/streams/{request_id:path}", endpoints.stream, None, "The rest of a stream, as server-sent events")
    tokenize = json_body(TokenizeRequest, TokenizeChatRequest)
    _post(app, "/tokenize", endpoints.tokenize, TokenizeAnswer, tokenize, "Text or messages to token ids")
    detokenize = json_body(DetokenizeRequest)
    _post(app, "/detokenize", endpoints.detokenize, DetokenizeAnswer, detokenize, "Token ids to text")
    _get(app, "/v1/models", endpoints.models, ModelList, "The model that is served")
    _get(app, "/v1/models/{model_id:path}", endpoints.model, ModelCard, "One model")
    _get(app, "/health", endpoints.health, None, "200 while the process lives")
    _get(app, "/ping", endpoints.health, None, "As /health", methods=("GET", "POST"))
    _get(app, "/ready", endpoints.ready, ReadyAnswer, "200 when requests can be served, else 503 and why")
    _get(app, "/readyz", endpoints.ready, ReadyAnswer, "As /ready")
    _get(app, "/version", endpoints.version, VersionAnswer, "The version of the server")
    _get(app, "/load", endpoints.load, LoadAnswer, "How many requests are being generated")
    _get(app, "/fleet", endpoints.fleet, FleetView, "The verifiers and drafters, as this gateway sees them")
    _get(app, "/metrics", endpoints.metrics, None, "Prometheus metrics")


def _post(app: FastAPI, path: str, endpoint: Endpoint, answer: Any, body: dict[str, Any], summary: str) -> None:
    errors: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorAnswer} for status in (400, 401, 404, 408, 409, 413, 429, 500, 503, 504)
    }
    app.add_api_route(
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
    app: FastAPI, path: str, endpoint: Endpoint, answer: Any, summary: str, methods: Sequence[str] = ("GET",)
) -> None:
    responses: dict[int | str, dict[str, Any]] = {200: {"model": answer} if answer is not None else {}}
    for method in methods:
        app.add_api_route(
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
