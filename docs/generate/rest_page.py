"""reference/rest.md: the routes and bodies of the REST door, from its own OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, cast

from docs.generate.markdown import cell, code, table
from outrider.gateway.servers.http.app import create_app
from outrider.gateway.servers.service import GatewayService
from outrider.shared.version import outrider_version

_INTRODUCTION = """# REST

The OpenAI API with vLLM's extensions; Outrider's own are `speculation` in the body and `metrics` in the answer. The
same document is at `/openapi.json` of a running gateway, and can be tried at `/docs` (loopback hosts only, unless
`--api-docs true`). This page is made from it. `null` means "not given". Errors have OpenAI's shape,
`{"error": {"message", "type", "param", "code"}}`, and name the field.
"""


def openapi_document() -> dict[str, Any]:
    # Routes and schemas need nothing of a service but its version.
    service = cast(GatewayService, SimpleNamespace(version=outrider_version()))
    return create_app(service, shows_tokenizer=True).openapi()


def rest_page() -> str:
    document = openapi_document()
    routes = [row for path, methods in document["paths"].items() for row in _routes(path, methods)]
    parts = [_INTRODUCTION, "\n## Routes\n\n", table(("", "path", "", "body", "answer"), routes)]
    parts.append("\n## Bodies and answers\n")
    parts += [_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())]
    return "".join(parts)


def _routes(path: str, methods: Mapping[str, Any]) -> Iterator[list[str]]:
    for method, operation in methods.items():
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        answer = operation["responses"].get("200", {}).get("content", {}).get("application/json", {}).get("schema", {})
        yield [method.upper(), code(path), cell(operation["summary"]), _type(body), _type(answer)]


def _schema(name: str, schema: Mapping[str, Any]) -> str:
    required = set(schema.get("required", ()))
    rows = []
    for field, kind in schema.get("properties", {}).items():
        default = "required" if field in required else code(_json(kind.get("default")))
        rows.append([code(field), _type(kind), default, cell(kind.get("description", ""))])
    head = f"\n### {name}\n\n{cell(schema.get('description', ''))}\n\n"
    return head + (table(("field", "type", "default", ""), rows) if rows else _type(schema) + "\n")


def _type(schema: Mapping[str, Any]) -> str:
    """A schema in a cell: names of other schemas are links to them."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    for joined in ("anyOf", "oneOf", "allOf"):
        if joined in schema:
            return " or ".join(dict.fromkeys(_type(part) for part in schema[joined]))
    if "enum" in schema:
        return ", ".join(code(_json(value)) for value in schema["enum"])
    if "const" in schema:
        return code(_json(schema["const"]))
    kind = schema.get("type")
    if kind == "array":
        return f"list of {_type(schema.get('items', {}))}"
    return str(kind) if kind else ("" if not schema else "any")


def _json(value: object) -> str:
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if not isinstance(value, list) else "[]"  # type: ignore[call-overload]
