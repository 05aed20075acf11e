"""Completions over REST with what the tests compare: token ids, text, origins, speculation figures."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class Answer:
    """One choice; `request_id` is the one that the commit log uses."""

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    origins: tuple[str, ...]
    finish_reason: str
    logprobs: Any
    speculation: Mapping[str, Any]


async def complete(http: httpx.AsyncClient, body: Mapping[str, Any]) -> Answer:
    """One /v1/completions request with n = 1; fails the test unless it is answered with 200."""
    reply = await http.post("/v1/completions", json={"return_token_ids": True, **body})
    assert reply.status_code == 200, reply.text
    whole = reply.json()
    (choice,) = whole["choices"]
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    return Answer(
        request_id=whole["id"],
        token_ids=tuple(choice["token_ids"]),
        text=choice["text"],
        origins=tuple(choice["outrider"]["origins"]),
        finish_reason=choice["finish_reason"],
        logprobs=choice["logprobs"],
        speculation=whole["metrics"]["speculative_decoding"],
    )


async def complete_all(
    http: httpx.AsyncClient, bodies: Iterable[Mapping[str, Any]], *, at_once: int = 8
) -> list[Answer]:
    """All of them, `at_once` at a time; answers in order."""
    room = asyncio.Semaphore(at_once)

    async def one(body: Mapping[str, Any]) -> Answer:
        async with room:
            return await complete(http, body)

    return list(await asyncio.gather(*(one(body) for body in bodies)))


def speculation(method: str, num_speculative_tokens: int | None = None, **fields: Any) -> dict[str, Any]:
    length = {} if num_speculative_tokens is None else {"num_speculative_tokens": num_speculative_tokens}
    return {"speculation": {"method": method, **length, **fields}}
