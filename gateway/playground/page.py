"""The playground: a page at / that shows speculation at work, built ahead and shipped with the gateway.

`add_playground(app)` adds its routes, `add_docs(app)` the API's documentation at /docs. The page needs no API key; its
requests do, like any client's. Neither loads anything from other hosts; the page's content security policy enforces it.

Not here: the page's source (web/; `make playground` builds it into static/).
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

DOCS = "/docs"
STATIC = Path(__file__).parent / "static"
PREFIX = "/playground/"
_PAGE = "index.html"
# Packed with gzip in STATIC, and sent so.
_SWAGGER_SCRIPT, _SWAGGER_STYLE = "swagger-ui-bundle.js", "swagger-ui.css"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
    ".woff2": "font/woff2",
}
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "font-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
_SECURITY = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
}
# These files' names contain a hash of their content.
_HASHED = {".js", ".css", ".woff2"}
_IMMUTABLE = "public, max-age=31536000, immutable"
_REVALIDATE = "no-cache"


@dataclass(frozen=True)
class _File:
    content: bytes
    headers: dict[str, str]


def add_playground(app: FastAPI) -> None:
    """Serves GET / and the files under /playground/. Without HTML in Accept, GET / is a JSON pointer to the API."""
    files = _load(STATIC)
    page = files.pop(_PAGE)
    about = _about(app)

    async def root(request: Request) -> Response:
        if "text/html" in request.headers.get("accept", ""):
            return _answer(request, page)
        return JSONResponse(about, headers={"vary": "accept"})

    _add(app, "/", root)
    for name, file in files.items():
        _add(app, PREFIX + name, _sender(file))


def add_docs(app: FastAPI) -> None:
    """Serves GET /docs and its files: the page that FastAPI has, without internet access."""
    for name in (_SWAGGER_SCRIPT, _SWAGGER_STYLE):
        path = STATIC / f"{name}.gz"
        file = _file(path, _TYPES[Path(name).suffix])
        _add(app, PREFIX + name, _sender(_File(file.content, {**file.headers, "content-encoding": "gzip"})))

    async def docs(_request: Request) -> Response:
        folder = PREFIX.removeprefix("/")  # relative, as a proxy may add a path prefix
        return get_swagger_ui_html(
            openapi_url="openapi.json",
            title=f"{app.title} API",
            swagger_js_url=f"{folder}{_SWAGGER_SCRIPT}",
            swagger_css_url=f"{folder}{_SWAGGER_STYLE}",
            swagger_favicon_url=f"{folder}favicon.svg",
        )

    _add(app, DOCS, docs)


def _about(app: FastAPI) -> dict[str, str]:
    about = {"name": "outrider", "version": app.version, "api": "/v1"}
    return about if app.openapi_url is None else {**about, "docs": DOCS}


def _load(folder: Path) -> dict[str, _File]:
    """Loads all files of a known type, about 100 KB; the rest belongs to the build."""
    return {path.name: _file(path, _TYPES[path.suffix]) for path in sorted(folder.iterdir()) if path.suffix in _TYPES}


def _file(path: Path, content_type: str) -> _File:
    content = path.read_bytes()
    headers = {
        **_SECURITY,
        "content-type": content_type,
        "cache-control": _IMMUTABLE if path.suffix in _HASHED else _REVALIDATE,
        "etag": f'"{hashlib.sha256(content).hexdigest()[:16]}"',
    }
    if path.name == _PAGE:
        headers["vary"] = "accept"
    return _File(content, headers)


def _sender(file: _File) -> Callable[[Request], Awaitable[Response]]:
    async def send(request: Request) -> Response:
        return _answer(request, file)

    return send


def _answer(request: Request, file: _File) -> Response:
    if request.headers.get("if-none-match") == file.headers["etag"]:
        return Response(status_code=304, headers=file.headers)
    return Response(file.content, headers=file.headers)


def _add(app: FastAPI, path: str, endpoint: Callable[[Request], Awaitable[Response]]) -> None:
    app.add_route(path, endpoint, methods=["GET"], include_in_schema=False)
