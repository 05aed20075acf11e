"""The HTTP server's application: OpenAI's endpoints, Anthropic's Messages, vLLM's helpers, health and metrics.

The entry point is `create_app(service)`. Its routes are in routes.py, and what they lead to in generations.py,
stored_responses.py and queries.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.admission.auth import Admission
from outrider.gateway.admission.body_budget import BodyBudget
from outrider.gateway.playground.page import add_docs, add_playground
from outrider.gateway.servers.http.admission import HttpAdmission
from outrider.gateway.servers.http.body_work import BodyWork
from outrider.gateway.servers.http.generations import Generations
from outrider.gateway.servers.http.http_answer import Load
from outrider.gateway.servers.http.limits import as_outrider_error, error_response, status_error_response
from outrider.gateway.servers.http.openapi import RouteWithoutSchemas, install_openapi
from outrider.gateway.servers.http.queries import Queries
from outrider.gateway.servers.http.receipts import Receipts
from outrider.gateway.servers.http.request_label import HEADER as REQUEST_LABEL_HEADER
from outrider.gateway.servers.http.request_label import RequestLabel
from outrider.gateway.servers.http.routes import Endpoints, add_routes
from outrider.gateway.servers.http.stored_responses import StoredResponses
from outrider.gateway.servers.service import GatewayService


@dataclass(frozen=True)
class Cors:
    """The web pages whose scripts may call the server. origins: empty: none; "*": all."""

    origins: tuple[str, ...] = ()
    methods: tuple[str, ...] = ("*",)
    headers: tuple[str, ...] = ("*",)
    credentials: bool = False


def create_app(
    service: GatewayService,
    *,
    cors: Cors = Cors(),
    admission: Admission | None = None,
    api_docs: bool = True,
    playground: bool = True,
    shows_tokenizer: bool = False,
) -> FastAPI:
    """The application; serve it with uvicorn.

    Without `admission`, no key is required and nothing is limited. `api_docs`: /docs and /openapi.json;
    `playground`: the page at /; `shows_tokenizer`: /tokenizer_info.
    """
    app = FastAPI(
        title="Outrider",
        summary="Lossless speculative decoding behind the OpenAI API",
        version=service.version,
        docs_url=None,
        openapi_url="/openapi.json" if api_docs else None,
        redoc_url=None,
        redirect_slashes=False,
    )
    endpoints = _endpoints(service, BodyBudget() if admission is None else admission.bodies)
    app.router.route_class = RouteWithoutSchemas
    add_routes(app.router, endpoints, shows_tokenizer=shows_tokenizer)
    if playground:
        add_playground(app)
    if api_docs:
        add_docs(app)
    install_openapi(app, lambda router: add_routes(router, endpoints, shows_tokenizer=shows_tokenizer))
    app.add_exception_handler(HTTPException, _routing_error)
    app.add_exception_handler(Exception, _unexpected_error)
    if admission is not None:
        app.add_middleware(HttpAdmission, admission=admission)
    app.add_middleware(RequestLabel)  # outside of admission: refusals have the label too
    if cors.origins:  # outermost: a browser must see refusals too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=cors.origins,
            allow_methods=cors.methods,
            allow_headers=cors.headers,
            allow_credentials=cors.credentials,
            expose_headers=[REQUEST_LABEL_HEADER],
        )
    return app


def _endpoints(service: GatewayService, bodies: BodyBudget) -> Endpoints:
    load, work = Load(), BodyWork(service, bodies)
    stored = StoredResponses(service, bodies, load)
    return Endpoints(
        Generations(service, work, stored, load), stored, Queries(service, work, load), Receipts(service, work, load)
    )


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
