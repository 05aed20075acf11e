"""The OpenAPI document. Bodies are parsed by our own code (limits, errors), so their schemas are added to FastAPI's.

FastAPI makes the schemas of all answers while routes are added: 95 % of the time that the application takes. So the
served routes have none, and the document is made from routes of its own when it is first requested.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from outrider.gateway.anthropic.schema import CountTokensRequest, MessagesRequest
from outrider.gateway.openai.schema import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeRequest,
)
from outrider.gateway.responses.schema import ResponsesRequest

_BODIES: tuple[type[BaseModel], ...] = (
    CompletionRequest,
    ChatCompletionRequest,
    ResponsesRequest,
    TokenizeRequest,
    TokenizeChatRequest,
    DetokenizeRequest,
    MessagesRequest,
    CountTokensRequest,
)


def json_body(*kinds: type[BaseModel]) -> dict[str, Any]:
    """Returns the `openapi_extra` of a route that accepts one of these bodies."""
    references = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


class RouteWithoutSchemas(APIRoute):
    """A route that is served; the schemas of its answers are left to the document's routes."""

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **{**options, "responses": None})


def install_openapi(app: FastAPI, add_routes: Callable[[APIRouter], None]) -> None:
    """Completes `app.openapi()` and /openapi.json. `add_routes` adds the documented routes to a router."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, add_routes)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI, add_routes: Callable[[APIRouter], None]) -> dict[str, Any]:
    router = APIRouter()
    add_routes(router)
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=router.routes)
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in _BODIES], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas["$defs"])
    return document
