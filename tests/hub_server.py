"""A small server that speaks as much of the Hugging Face Hub's HTTP API as its client uses to download a model.

Written from the client's requests and the Hub's published API (/api/models/..., /ORG/NAME/resolve/REVISION/FILE).
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """repos: name (of a data set: datasets/ORG/NAME) -> file -> content. `requests`: what was asked for, in order."""

    repos: Mapping[str, Mapping[str, bytes]]
    gated: frozenset[str] = frozenset()
    revisions: frozenset[str] = frozenset({"main", COMMIT})
    url: str = ""
    requests: list[str] = field(default_factory=list)


@contextmanager
def running_hub(hub: Hub, host: str = "127.0.0.1") -> Iterator[Hub]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            path = self.path.split("?")[0]
            hub.requests.append(f"{self.command} {path}")
            api = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)(?:/(?:revision|tree)/([^/]+))?", path)
            resolve = re.fullmatch(r"/((?:datasets/)?[\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path)
            match = api or resolve
            if match is None:
                return self._send(404, b"")
            repo, revision = match[1], match[2] or "main"
            if repo not in hub.repos:
                return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            if repo in hub.gated and self.headers.get("Authorization") is None:
                return self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            if revision not in hub.revisions:
                return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            files = hub.repos[repo]
            if "/tree/" in path:
                rows = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                return self._send(200, json.dumps(rows).encode(), {"Content-Type": "application/json"})
            if api:
                info = {
                    "id": repo,
                    "sha": COMMIT,
                    "siblings": [{"rfilename": name, "size": len(data)} for name, data in files.items()],
                }
                return self._send(200, json.dumps(info).encode(), {"Content-Type": "application/json"})
            data = files.get(match[3])
            if data is None:
                return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
            return self._send(200, data, {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}, body)

        def _send(self, status: int, data: bytes, headers: Mapping[str, str] | None = None, body: bool = True) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if body and self.command == "GET":
                self.wfile.write(data)

    server = ThreadingHTTPServer((host, 0), Handler)
    hub.url = f"http://{host}:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
