"""HTTP over simulated links: the application is called as uvicorn calls it, with a client that reads when it likes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tests.simulation.links import Later, Link, Network
from tests.simulation.loop import Process

# bytes; sent and not yet read, beyond which the server's `send` waits
WINDOW_BYTES = 2048


class Lost(Exception):
    """The connection is over before the answer is."""


@dataclass
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: dict[str, Any] | None = None


class HttpCall:
    """One request on a connection of its own, at its client."""

    def __init__(self, net: Network, client: Process, gateway: str, request: HttpRequest) -> None:
        """Raises Lost when nobody listens."""
        node = net.servers.get(gateway)
        if node is None or node.process.is_dead:  # type: ignore[attr-defined]
            raise Lost("connection refused")
        self.status = 0
        self._parts: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._link = net.connect(client, node.process, "http")  # type: ignore[attr-defined]
        self._link.client.lost.append(lambda: self._parts.put_nowait(None))
        self._served = ServedCall(net, node, self._link, self._parts, request)
        what = f"{request.method} {request.path} {request.headers.get('last-event-id', '')}".rstrip()
        self._link.send(what, self._served.start, by_client=True)

    async def read(self, timeout_s: float) -> bytes | None:
        """The next piece of the body; None at its end. Raises Lost, also when nothing comes in time."""
        while True:
            try:
                async with asyncio.timeout(timeout_s):
                    part = await self._parts.get()
            except TimeoutError:
                raise Lost(f"nothing for {timeout_s:g} s") from None
            if part is None:
                raise Lost("connection lost")
            if part["type"] == "http.response.start":
                self.status = part["status"]
                continue
            data: bytes = part.get("body", b"")
            self._link.send(f"read {len(data)}", partial(self._served.acknowledge, len(data)), by_client=True)
            if data:
                if not part.get("more_body", False):
                    self._parts.put_nowait({"type": "http.response.body"})
                return data
            if not part.get("more_body", False):
                return None

    def hang_up(self) -> None:
        self._link.close(by_client=True)


class ServedCall:
    """The same request at its gateway."""

    def __init__(self, net: Network, node: Any, link: Link, parts: asyncio.Queue[Any], request: HttpRequest) -> None:
        self._net, self._node, self._link, self._parts, self._request = net, node, link, parts, request
        self._gone = asyncio.Event()
        self._room = asyncio.Event()
        self._num_unread = 0
        self._has_read_body = False
        link.server.lost.append(self._lose)

    def start(self) -> None:
        self._node.process.spawn(self._run())

    async def _run(self) -> None:
        request = self._request
        path, _, query = request.path.partition("?")
        headers = {"host": "gateway", "content-type": "application/json", **request.headers}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": request.method,
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "client": (self._link.client.process.name, 1),
            "server": ("127.0.0.1", 80),
        }
        await self._node.app(scope, self._receive, self._send)
        self._link.close(by_client=False)

    def acknowledge(self, num_bytes: int) -> None:
        self._num_unread -= num_bytes
        self._room.set()

    def _lose(self) -> None:
        self._gone.set()
        self._room.set()

    async def _receive(self) -> dict[str, Any]:
        if not self._has_read_body:
            self._has_read_body = True
            body = b"" if self._request.body is None else json.dumps(self._request.body).encode()
            return {"type": "http.request", "body": body, "more_body": False}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        data: bytes = message.get("body", b"")
        self._num_unread += len(data)
        self._link.send(Later(_shown, message), lambda: self._parts.put_nowait(message), by_client=False)
        while self._num_unread > WINDOW_BYTES and not self._gone.is_set():
            self._room.clear()
            await self._room.wait()


def _shown(message: dict[str, Any]) -> str:
    if message["type"] == "http.response.start":
        return f"status {message['status']}"
    data: bytes = message.get("body", b"")
    ids = [line[4:].decode() for line in data.split(b"\n") if line.startswith(b"id: ")]
    end = "" if message.get("more_body", False) else " end"
    return f"{len(data)} bytes {' '.join(ids) or data[:100].decode('utf-8', 'replace')}{end}"
