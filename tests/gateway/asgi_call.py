"""One request straight into an ASGI app, with a client that can hang up (httpx's transport cannot)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from starlette.types import ASGIApp, Message


class AsgiCall:
    """Call `start`, then read `chunks` (None is the end); `hang_up` is a closed connection."""

    def __init__(self, app: ASGIApp, path: str, body: dict[str, Any]) -> None:
        self._app = app
        self._path = path
        self._body = json.dumps(body).encode()
        self._gone = asyncio.Event()
        self._body_sent = False
        self.status: int | None = None
        self.chunks: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.task: asyncio.Task[None] | None = None

    def start(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json"), (b"host", b"test")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self.task = asyncio.ensure_future(self._app(scope, self._receive, self._send))

    def hang_up(self) -> None:
        self._gone.set()

    async def _receive(self) -> Message:
        if not self._body_sent:
            self._body_sent = True
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            if message.get("body"):
                self.chunks.put_nowait(message["body"])
            if not message.get("more_body", False):
                self.chunks.put_nowait(None)
