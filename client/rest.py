"""A REST API as a client sees it: address, API key, TLS, server-sent events, errors as one sentence.

Works with any OpenAI-compatible server. Not here: what is requested (chat.py, bench/) and gRPC (generate.py).
"""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from outrider.shared.errors import InvalidRequest, OutriderError, Unauthenticated, Unavailable
from outrider.shared.tls import TlsConfig, client_context

# seconds; a connection comes at once or not at all, an answer may take minutes on a busy server
TIMEOUT = httpx.Timeout(600.0, connect=10.0)
_MAX_WORDS = 300


def server_root(url: str) -> str:
    """The URL without the "/v1" that OpenAI clients expect at its end. Raises InvalidRequest."""
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")):
        raise InvalidRequest(
            f"{url!r} is not a URL (--url, --base-url or OPENAI_BASE_URL): it must begin with http:// or https://",
            param="url",
        )
    return root


def headers(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def verification(tls: TlsConfig | None) -> ssl.SSLContext | bool:
    """Returns the value of httpx's `verify`."""
    return True if tls is None else client_context(tls)


def rest_client(url: str, api_key: str = "", tls: TlsConfig | None = None) -> httpx.Client:
    return httpx.Client(base_url=server_root(url), headers=headers(api_key), verify=verification(tls), timeout=TIMEOUT)


def get_json(client: httpx.Client, path: str) -> dict[str, Any]:
    """The JSON object at `path`. Raises OutriderError as `refusal` and `clear_transport` do."""
    with clear_transport(str(client.base_url)):
        reply = client.get(path)
    if reply.status_code != 200:
        raise refusal(reply.status_code, reply.text, asked_for=path)
    return as_object(reply.text)


def served_model(client: httpx.Client) -> str:
    """The first model in /v1/models. Raises InvalidRequest when there is none."""
    cards = get_json(client, "/v1/models").get("data") or []
    if not cards:
        raise InvalidRequest("the server's /v1/models lists no model: give --model", param="model")
    return str(cards[0]["id"])


def parse_event(line: str) -> dict[str, Any] | None:
    """The object of a "data:" line; None for other lines and for [DONE]. Raises OutriderError for an error event."""
    if not line.startswith("data:"):
        return None
    data = line[5:].strip()
    if data == "[DONE]":
        return None
    event = as_object(data)
    if event.get("error"):
        raise refusal(200, data)
    return event


def as_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise OutriderError(f"the server's answer is not a JSON object: {text[:_MAX_WORDS]}")
    return value


def refusal(status: int, text: str, asked_for: str = "") -> OutriderError:
    """The error for a refused request: the path, then the server's own message. Its type decides the exit code."""
    try:
        error = json.loads(text)["error"]
        words = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        words = "" if text.lstrip().startswith("<") else text  # a page for people
    words = " ".join(words.split())
    words = f"{words[:_MAX_WORDS]} (HTTP {status})".lstrip() if status != 200 else words[:_MAX_WORDS]
    words = f"{asked_for}: {words}" if asked_for else words
    if status in (401, 403):
        return Unauthenticated(words)
    if status in (400, 404, 413, 422):
        return InvalidRequest(words)
    return Unavailable(words) if status in (429, 502, 503, 504) else OutriderError(words)


@contextmanager
def clear_transport(url: str) -> Iterator[None]:
    """Turns httpx's errors into Unavailable."""
    try:
        yield
    except (httpx.TransportError, httpx.InvalidURL) as error:
        words = f"{url}: {str(error) or type(error).__name__}"
        if isinstance(error, httpx.ConnectError) and "SSL" not in words:
            words += ": is a server running there? `outrider serve MODEL` starts one, --url names another"
        raise Unavailable(words) from None
