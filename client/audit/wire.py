"""HTTP requests to the audited server, which is not trusted: each answer has a deadline and a largest size."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx

from .answers import Answer, NoAnswerInTime, ServerError, read_answer

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# s; one request with its whole answer
DEFAULT_TIMEOUT_S = 120.0
# s; GET, which computes nothing
_GET_TIMEOUT_S = 10.0
# bytes of one answer; the largest that the audit asks for, 96 positions with lists of 20, has less than 1 MB
_MAX_ANSWER_BYTES = 16 << 20
# tries of a request that is answered by 429, and the longest wait for the next one, s
_TRIES = 6
_LONGEST_WAIT_S = 30.0
# bytes of an error that are kept
_ERROR_BYTES = 1200


class Server:
    """A client of one server. Counts requests and completion tokens; safe to use from several threads.

    Every method that asks raises ServerError and NoAnswerInTime.
    """

    def __init__(
        self,
        url: str,
        api_key: str = "",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.num_requests = 0
        self.num_tokens = 0
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
        # No connection is used twice: one that the server closes behind an answer would look like a server that died.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._client = httpx.Client(headers=headers, transport=transport, trust_env=False, limits=limits)

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> str:
        return self._send("GET", path, None, min(self._timeout_s, _GET_TIMEOUT_S)).decode(errors="replace")

    def first_model(self) -> str:
        try:
            return str(json.loads(self.get("/v1/models"))["data"][0]["id"])
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ServerError(0, f"/v1/models is no list of models: {error!r}", {}) from error

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer's JSON; for a stream the list of its events."""
        with self._lock:
            self.num_requests += 1
        data = self._send("POST", path, body, self._timeout_s)
        try:
            if not body.get("stream"):
                return json.loads(data)
            lines = (line[5:].strip() for line in data.splitlines() if line.startswith(b"data:"))
            return [json.loads(line) for line in lines if line != b"[DONE]"]
        except (ValueError, RecursionError) as error:
            raise ServerError(0, f"not JSON: {error}", body) from error

    def ask(self, path: str, body: Mapping[str, Any]) -> list[Answer]:
        """One answer per choice."""
        raw = self.post(path, body)
        answers = [read_answer(raw, body, index) for index in range(body.get("n") or 1)]
        spent = answers[0].num_completion_tokens or sum(len(answer.ids) for answer in answers)
        with self._lock:
            self.num_tokens += spent
        return answers

    def ask_all(self, path: str, bodies: Sequence[Mapping[str, Any]], width: int) -> list[list[Answer] | ServerError]:
        """The answers in the order of the requests, of which `width` run at once."""

        def attempt(body: Mapping[str, Any]) -> list[Answer] | ServerError:
            try:
                return self.ask(path, body)
            except ServerError as error:
                return error

        pool = ThreadPoolExecutor(width)
        try:
            return list(pool.map(attempt, bodies))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # Ctrl-C does not wait for answers

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> bytes:
        """The whole answer, within its deadline. After 429 it asks again."""
        for attempt in range(_TRIES):
            status, headers, data = self._read(method, path, body, timeout_s)
            if status != httpx.codes.TOO_MANY_REQUESTS or attempt == _TRIES - 1:
                break
            time.sleep(min(_seconds(headers.get("retry-after"), 2.0**attempt), _LONGEST_WAIT_S))
        if not httpx.codes.is_success(status):
            raise ServerError(status, data[:_ERROR_BYTES].decode(errors="replace"), body or {"path": path})
        return data

    def _read(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, httpx.Headers, bytes]:
        asked, deadline, data = body or {"path": path}, time.monotonic() + timeout_s, bytearray()
        late = f"no whole answer to {method} {path} within {timeout_s:g} s"
        try:
            with self._client.stream(method, self.url + path, json=body, timeout=timeout_s) as reply:
                for chunk in reply.iter_raw():
                    data += chunk
                    if len(data) > _MAX_ANSWER_BYTES:
                        raise ServerError(0, f"an answer of more than {_MAX_ANSWER_BYTES >> 20} MB", asked)
                    if time.monotonic() > deadline:
                        raise NoAnswerInTime(late)
                return reply.status_code, reply.headers, bytes(data)
        except httpx.TimeoutException as error:
            raise NoAnswerInTime(late) from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            raise ServerError(0, f"no answer: {str(error) or type(error).__name__}", asked) from error


def _seconds(text: str | None, otherwise: float) -> float:
    """The value of a header in seconds; dates are not read."""
    return float(text) if text is not None and text.isdecimal() else otherwise
