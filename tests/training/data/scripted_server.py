"""A real HTTP server on a real socket that answers /v1 requests as a function says: for failures that no healthy server
would give on request. Completions of a healthy server are tested against the stack itself."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

# (path, body) -> (status, headers, JSON); status 0 drops the connection without an answer.
Answer = Callable[[str, dict[str, Any]], tuple[int, dict[str, str], Any]]


@dataclass
class ScriptedServer:
    url: str
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)

    def bodies(self) -> list[dict[str, Any]]:
        return [body for _, body, _ in self.requests]


@contextmanager
def scripted_server(answer: Answer) -> Iterator[ScriptedServer]:
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def _answer(self, body: dict[str, Any]) -> None:
            with lock:
                state.requests.append((self.path, body, {k.lower(): v for k, v in self.headers.items()}))
                status, headers, reply = answer(self.path, body)
            if status == 0:
                self.close_connection = True
                return
            content = reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {**headers, "content-length": str(len(content))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_arguments: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state = ScriptedServer(f"http://127.0.0.1:{server.server_port}/v1")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def completion(text: str, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"text": text, "finish_reason": "stop", **fields}]}
