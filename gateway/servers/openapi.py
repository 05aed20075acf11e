"""The OpenAPI document. Bodies are parsed by our own code (limits, errors), so their schemas are added to FastAPI's."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
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
    """`openapi_extra` of a route that accepts one of these bodies."""
    references = [{"$ref": f"#/components/schemas/{kind.__name__}"} for kind in kinds]
    schema = references[0] if len(references) == 1 else {"anyOf": references}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def install_openapi(app: FastAPI) -> None:
    """Completes `app.openapi()` and /openapi.json."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, summary=app.summary, routes=app.routes)
    _, schemas = models_json_schema(
        [(kind, "validation") for kind in _BODIES], ref_template="#/components/schemas/{model}"
    )
    components = document.setdefault("components", {}).setdefault("schemas", {})
    components.update(schemas["$defs"])
    return document
