"""The routes that generate nothing: tokens of a text, the served model, health, load, metrics and the fleet."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.anthropic.convert import count_tokens
from outrider.gateway.anthropic.schema import CountTokensRequest
from outrider.gateway.openai.answer_types import ModelCard, ModelList
from outrider.gateway.openai.schema import parse_body
from outrider.gateway.openai.tokenization import detokenize, tokenize, tokenizer_info
from outrider.gateway.request.served import ServedModel
from outrider.gateway.servers.http.body_work import BodyWork
from outrider.gateway.servers.http.http_answer import Load
from outrider.gateway.servers.service import GatewayService
from outrider.gateway.tool_calls.formats import NONE
from outrider.shared.errors import UnknownModel


class Queries:
    def __init__(self, service: GatewayService, work: BodyWork, load: Load) -> None:
        self._service = service
        self._work = work
        self._load = load

    async def count_tokens(self, request: Request) -> Response:
        served = self._service.served
        return await self._work.answered(
            request, lambda body: {"input_tokens": count_tokens(parse_body(CountTokensRequest, body), served)}
        )

    async def tokenize(self, request: Request) -> Response:
        served = self._service.served
        return await self._work.answered(request, lambda body: tokenize(body, served))

    async def detokenize(self, request: Request) -> Response:
        served = self._service.served
        return await self._work.answered(request, lambda body: detokenize(body, served))

    async def tokenizer_info(self, request: Request) -> Response:
        return JSONResponse(tokenizer_info(self._service.tokenizer))

    async def models(self, request: Request) -> Response:
        answer: ModelList = {"object": "list", "data": [self._model_card(self._service.model)]}
        return JSONResponse(answer)

    async def model(self, request: Request) -> Response:
        model, name = self._service.model, request.path_params["model_id"]
        if name != model.name:
            raise UnknownModel(f"model {name[:200]!r} is not served; the served model is {model.name!r}", param="model")
        return JSONResponse(self._model_card(model))

    def _model_card(self, model: ServedModel) -> ModelCard:
        return {
            "id": model.name,
            "object": "model",
            "created": model.created,
            "owned_by": "outrider",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len,
            "draft_methods": list(model.draft_methods),
            "chats": self._service.tokenizer.chat_template_source is not None,
            "tool_call_parser": "" if model.tool_call_parser == NONE else model.tool_call_parser,
        }

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
