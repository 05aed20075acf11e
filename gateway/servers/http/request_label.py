"""`X-Request-Id`, an ASGI middleware: a label that the answer repeats and the log shows. It names no request.

Proxies reuse such labels for retries and write them in forms of their own, so any value is taken, and any number of
requests may have the same. What resumes a request is the id in its answer (convert.py).
"""

from __future__ import annotations

import logging

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

log = logging.getLogger(__name__)

HEADER = "x-request-id"


class RequestLabel:
    """Wraps the application. Answers to requests without a label keep the header they have: the answer's own id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        label = Headers(scope=scope).get(HEADER) if scope["type"] == "http" else None
        if not label:
            await self._app(scope, receive, send)
            return

        async def labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[HEADER] = label
                status: int = message["status"]
                level = logging.WARNING if status >= 500 else logging.DEBUG
                log.log(level, "%s %s answered %d, %s %r", scope["method"], scope["path"], status, HEADER, label)
            await send(message)

        await self._app(scope, receive, labelled)
