"""Requests one completion from an OpenAI-compatible server: retries with back-off, errors as one sentence.

Works with Outrider and vLLM, which can return token ids, and with servers that cannot. Not here: which prompts, and
where the answers go (prepare_data.py).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

from outrider.training.data.prompts import Prompt
from outrider.training.errors import ServerError

ItemT = TypeVar("ItemT")
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.5, 30.0
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
# Statuses after which every further request would fail too: wrong key, address or model name.
_FATAL = frozenset({401, 403, 404, 405})


class FatalServerError(ServerError):
    """Every further request would fail in the same way."""


@dataclass(frozen=True)
class CompletionRequest:
    """One request. Temperature 0 is greedy; without a seed, sampling is up to the server.

    extra: further fields of the body, specific to the server.
    """

    prompt: Prompt
    temperature: float
    seed: int | None
    max_tokens: int
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass
class CompletionClient:
    """A client that all workers share. asks_token_ids: turned off once the server rejects the field."""

    http: httpx.AsyncClient
    model: str
    max_retries: int = 6
    asks_token_ids: bool = True
    num_retries: int = field(default=0, init=False)

    async def complete(self, request: CompletionRequest) -> dict[str, Any]:
        """Returns the completion, and where the server returns them token_ids, prompt_token_ids, finish_reason and
        metrics.

        Values that the server does not return are None. Raises ServerError when this prompt is refused or retries are
        used up, FatalServerError when every request would be refused.
        """
        route = "chat/completions" if request.prompt.is_chat else "completions"
        attempt = 0
        while True:
            asks_token_ids = self.asks_token_ids
            try:
                reply = await self.http.post(route, json=self._body(request, asks_token_ids))
            except httpx.TransportError as error:
                problem, wait_s = f"{type(error).__name__}: {error}", 0.0
            else:
                if reply.status_code == 200:
                    return _answer(reply, request.prompt.is_chat)
                problem = f"status {reply.status_code}: {_words(reply)}"
                if reply.status_code == 400 and asks_token_ids and "return_token_ids" in reply.text:
                    self.asks_token_ids = False
                    continue
                if reply.status_code in _FATAL:
                    raise FatalServerError(f"{reply.url} answers with {problem}")
                if reply.status_code not in _RETRIED:
                    raise ServerError(problem)
                wait_s = _retry_after_s(reply)
            if attempt >= self.max_retries:
                raise ServerError(f"{problem} (after {attempt} retries)")
            backoff_s = min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * 2**attempt) * random.uniform(0.5, 1.0)
            await asyncio.sleep(max(wait_s, backoff_s))
            attempt += 1
            self.num_retries += 1

    def _body(self, request: CompletionRequest, asks_token_ids: bool) -> dict[str, Any]:
        body = request.prompt.fields() | {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            **request.extra,
        }
        if request.seed is not None:
            body["seed"] = request.seed
        return body | {"return_token_ids": True} if asks_token_ids else body


async def for_each(items: Iterable[ItemT], ask: Callable[[ItemT], Awaitable[None]], concurrency: int) -> None:
    """Awaits `ask` for every item, at most `concurrency` at a time. The first error cancels the rest and is raised."""
    queue = iter(items)

    async def work() -> None:
        for item in queue:
            await ask(item)

    workers = [asyncio.create_task(work()) for _ in range(concurrency)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


def _retry_after_s(reply: httpx.Response) -> float:
    value = reply.headers.get("retry-after", "")
    return min(_MAX_BACKOFF_S, float(value)) if value.isdigit() else 0.0


def _words(reply: httpx.Response) -> str:
    """Returns the server's own message if its body has one, else the start of the body."""
    try:
        error = reply.json()["error"]
        return str(error["message"] if isinstance(error, dict) else error)[:300]
    except (ValueError, KeyError, TypeError):
        return reply.text[:300]


def _answer(reply: httpx.Response, is_chat: bool) -> dict[str, Any]:
    try:
        body = reply.json()
        choice = body["choices"][0]
        text = choice["message"]["content"] if is_chat else choice["text"]
        if text is not None and not isinstance(text, str):
            raise TypeError(f"the text is a {type(text).__name__}")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError(f"the answer is not a completion: {error!r}: {reply.text[:200]}") from error
    return {
        "completion": text or "",
        "token_ids": choice.get("token_ids"),
        "prompt_token_ids": choice.get("prompt_token_ids") or body.get("prompt_token_ids"),
        "finish_reason": choice.get("finish_reason"),
        "metrics": body.get("metrics"),
    }
