"""HTTP requests to the audited server, and its answers in one form whatever the engine."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
# nats; engines report "impossible" as a very small number, which is left out of a list
_IMPOSSIBLE_LOGPROB = -1e4
# characters of an error's text that are kept
_ERROR_CHARS = 300

Law = tuple[tuple[str, float], ...]  # (token key, log-probability), most likely first


class ServerError(Exception):
    """The server refused the request (4xx) or failed (5xx, or 0: the connection was lost)."""

    def __init__(self, status: int, text: str, request: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {text[:_ERROR_CHARS]}")
        self.status = status
        self.request = dict(request)

    @property
    def is_failure(self) -> bool:
        return self.status == 0 or self.status >= 500


@dataclass(frozen=True)
class Token:
    """One generated token as the server's logprobs report it."""

    key: str  # its identity: `token_id:N` where the server names ids, else its bytes or text
    logprob: float | None
    law: Law = ()


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    request: Mapping[str, Any]
    text: str
    tokens: tuple[Token, ...] = ()
    ids: tuple[int, ...] = ()
    finish: str | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    calls: tuple[Call, ...] = ()
    longest_chunk: int = 0  # token ids in one event of the stream
    prompt_logprobs: Sequence[Any] | None = None


class Server:
    """A client of one server. Counts requests and completion tokens; safe to use from several threads."""

    def __init__(
        self, url: str, api_key: str = "", timeout_s: float = 300.0, transport: httpx.BaseTransport | None = None
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self.num_requests = 0
        self.num_tokens = 0
        self._lock = threading.Lock()
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = httpx.Client(timeout=timeout_s, headers=headers, transport=transport, trust_env=False)

    def get(self, path: str) -> httpx.Response:
        try:
            reply = self._client.get(self.url + path)
        except httpx.HTTPError as error:
            raise ServerError(0, repr(error), {"path": path}) from error
        if reply.status_code >= 400:
            raise ServerError(reply.status_code, reply.text, {"path": path})
        return reply

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The answer's JSON; for a stream the list of its events. Raises ServerError."""
        with self._lock:
            self.num_requests += 1
        try:
            if not body.get("stream"):
                reply = self._client.post(self.url + path, json=dict(body))
                if reply.status_code >= 400:
                    raise ServerError(reply.status_code, reply.text, body)
                return reply.json()
            return self._events(path, body)
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(0, repr(error), body) from error

    def ask(self, path: str, body: Mapping[str, Any]) -> list[Answer]:
        """One answer per choice. Raises ServerError."""
        raw = self.post(path, body)
        answers = [read_answer(raw, body, index) for index in range(int(body.get("n") or 1))]
        spent = int(answers[0].usage.get("completion_tokens") or sum(len(answer.ids) for answer in answers))
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

        with ThreadPoolExecutor(width) as pool:
            return list(pool.map(attempt, bodies))

    def _events(self, path: str, body: Mapping[str, Any]) -> list[Any]:
        events = []
        with self._client.stream("POST", self.url + path, json=dict(body)) as reply:
            if reply.status_code >= 400:
                reply.read()
                raise ServerError(reply.status_code, reply.text, body)
            for line in reply.iter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    events.append(json.loads(line[5:]))
        return events


def read_answer(raw: Any, body: Mapping[str, Any], index: int = 0) -> Answer:
    """Choice `index` of a whole answer or of a stream's events. Raises ServerError for what is neither."""
    try:
        if isinstance(raw, list):
            return _read_stream(raw, body, index)
        choice = next(choice for choice in raw["choices"] if choice.get("index", 0) == index)
        message = choice.get("message") or {}
        functions = [call["function"] for call in message.get("tool_calls") or []]
        return Answer(
            request=body,
            text=choice["text"] if "text" in choice else message.get("content") or "",
            tokens=_read_logprobs(choice.get("logprobs"), _list_size(body)),
            ids=tuple(choice.get("token_ids") or ()),
            finish=choice.get("finish_reason"),
            usage=raw.get("usage") or {},
            calls=tuple(Call(f["name"], f["arguments"]) for f in functions),
            prompt_logprobs=choice.get("prompt_logprobs") or raw.get("prompt_logprobs"),
        )
    except (KeyError, TypeError, ValueError, AttributeError, StopIteration) as error:
        raise ServerError(0, f"not an OpenAI answer: {error!r}", body) from error


def _read_stream(events: Sequence[Any], body: Mapping[str, Any], index: int) -> Answer:
    text, finish, longest = "", None, 0
    usage: Mapping[str, Any] = {}
    ids: list[int] = []
    tokens: list[Token] = []
    calls: dict[int, Call] = {}
    for event in events:
        if "error" in event:
            raise ServerError(500, str(event["error"]), body)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            if choice.get("index", 0) != index:
                continue
            delta = choice.get("delta") or {}
            text += (choice.get("text") if "text" in choice else delta.get("content")) or ""
            new_ids = choice.get("token_ids") or []
            longest = max(longest, len(new_ids))
            ids += new_ids
            tokens += _read_logprobs(choice.get("logprobs"), _list_size(body))
            for part in delta.get("tool_calls") or []:
                before, function = calls.get(part.get("index", 0), Call("", "")), part.get("function") or {}
                name = before.name + (function.get("name") or "")
                calls[part.get("index", 0)] = Call(name, before.arguments + (function.get("arguments") or ""))
            finish = choice.get("finish_reason") or finish
    ordered = tuple(calls[key] for key in sorted(calls))
    return Answer(body, text, tuple(tokens), tuple(ids), finish, usage, ordered, longest)


def _list_size(body: Mapping[str, Any]) -> int:
    return int(body.get("top_logprobs") or body.get("logprobs") or 0)


def _read_logprobs(logprobs: Any, size: int) -> tuple[Token, ...]:
    """Both forms: chat's `content`, and the columns of completions."""
    if not logprobs:
        return ()
    if logprobs.get("content") is not None:
        return tuple(
            Token(_key(e), e["logprob"], ranked({_key(d): d["logprob"] for d in e.get("top_logprobs") or []}, size))
            for e in logprobs["content"]
        )
    names, chosen = logprobs.get("tokens") or [], logprobs.get("token_logprobs") or []
    lists = logprobs.get("top_logprobs") or [None] * len(names)
    return tuple(Token(n, p, ranked(d or {}, size)) for n, p, d in zip(names, chosen, lists, strict=True))


def _key(entry: Mapping[str, Any]) -> str:
    if entry.get("id") is not None:
        return f"token_id:{entry['id']}"
    return "bytes:" + bytes(entry["bytes"]).hex() if entry.get("bytes") else str(entry["token"])


def ranked(entries: Mapping[str, float | None], size: int) -> Law:
    """The `size` most likely ones: some engines add the chosen token as one more."""
    possible = [(key, value) for key, value in entries.items() if value is not None and value > _IMPOSSIBLE_LOGPROB]
    return tuple(sorted(possible, key=lambda entry: -entry[1])[:size])
