"""A client that does what the API tells it to: when a stream breaks it goes on at any gateway with Last-Event-ID."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

# A gateway that is paused says nothing; the client goes elsewhere after this.
_SILENCE_S = 20.0
_PAUSE_S = 0.3
_AT_FAULT = (400, 401, 413)


@dataclass
class Choice:
    """One choice's answer so far. logprobs: each list of the legacy format, joined over the events."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: dict[str, list[Any]] = field(default_factory=dict)
    # Name and arguments of each tool call. Its id belongs to the request, so two requests' ids differ.
    calls: list[list[str]] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        self.token_ids += choice.get("token_ids") or ()
        delta = choice.get("delta") or {}
        self.text += choice.get("text") or delta.get("content") or ""
        for entry in delta.get("tool_calls") or ():
            if entry["index"] == len(self.calls):
                self.calls.append([entry["function"]["name"], ""])
            self.calls[entry["index"]][1] += entry["function"]["arguments"]
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.stop_reason = choice.get("stop_reason") or self.stop_reason
        for name, values in (choice.get("logprobs") or {}).items():
            self.logprobs.setdefault(name, []).extend(values)


@dataclass
class Received:
    """What one request has brought so far."""

    choices: dict[int, Choice] = field(default_factory=dict)
    last_event_id: str = ""
    num_reconnects: int = 0
    # Between two events, lost connections and the search for another gateway included; the first from the request on.
    stalls_s: list[float] = field(default_factory=list)
    last_event_s: float = field(default_factory=time.monotonic)
    problems: list[str] = field(default_factory=list)


class Refused(Exception):
    """The answer says that the request itself is at fault: asking again would change nothing."""


class _Ended(Exception):
    """The stream is complete."""


async def fetch(
    urls: Sequence[str], request_id: str, body: dict[str, Any], rng: random.Random, deadline_s: float
) -> Received:
    """The whole answer of one request, however often its gateway is lost. Raises TimeoutError, Refused."""
    received = Received()
    async with asyncio.timeout(deadline_s), httpx.AsyncClient(timeout=httpx.Timeout(10.0, read=_SILENCE_S)) as http:
        while True:
            try:
                await _attempt(http, rng.choice(list(urls)), request_id, body, received)
            except _Ended:
                return received
            except (httpx.HTTPError, _Broken) as problem:
                received.problems.append(f"{type(problem).__name__}: {problem}"[:200])
            received.num_reconnects += 1
            await asyncio.sleep(_PAUSE_S)


class _Broken(Exception):
    """The answer says that it cannot go on here and now."""


async def _attempt(
    http: httpx.AsyncClient, url: str, request_id: str, body: dict[str, Any], received: Received
) -> None:
    path, prefix = ("/v1/chat/completions", "chatcmpl") if "messages" in body else ("/v1/completions", "cmpl")
    if received.num_reconnects:
        headers = {"Last-Event-ID": received.last_event_id} if received.last_event_id else {}
        async with http.stream("GET", f"{url}/v1/streams/{prefix}-{request_id}", headers=headers) as answer:
            if answer.status_code == 200:
                await _read(answer, received)
                raise _Broken("the stream ended early")
            await answer.aread()
            if answer.status_code != 404 or received.last_event_id:
                raise _Broken(f"{answer.status_code} {answer.text[:160]}")
    async with http.stream("POST", f"{url}{path}", json={**body, "request_id": request_id}) as answer:
        if answer.status_code == 200:
            await _read(answer, received)
            raise _Broken("the stream ended early")
        await answer.aread()
        if answer.status_code in _AT_FAULT:
            raise Refused(f"{answer.status_code} {answer.text[:300]}")
        raise _Broken(f"{answer.status_code} {answer.text[:160]}")


async def _read(answer: httpx.Response, received: Received) -> None:
    event_id = ""
    async for line in answer.aiter_lines():
        name, _, value = line.partition(": ")
        if name == "id":
            event_id = value
        elif name == "data":
            if value == "[DONE]":
                raise _Ended
            content = json.loads(value)
            if "error" in content:
                raise _Broken(str(content["error"])[:160])
            now = time.monotonic()
            received.stalls_s.append(now - received.last_event_s)
            received.last_event_s = now
            for choice in content["choices"]:
                received.choices.setdefault(choice["index"], Choice()).add(choice)
            received.last_event_id = event_id
