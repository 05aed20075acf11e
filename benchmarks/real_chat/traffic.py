"""One measured run: questions sent to a system as chats, some at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.peers.server_process import PeerError, ServerProcess
from outrider.client.bench.acceptance import Acceptance, counted_by_server, total
from outrider.client.bench.request import RequestResult, timed_request
from outrider.client.bench.run import CHAT_ENDPOINT
from outrider.client.rest import TIMEOUT


@dataclass(frozen=True, eq=False)
class Variant:
    """A server, and how it drafts. fields: of the request's body, beyond what every system is asked.

    process: a peer's, which holds still while others are measured.
    """

    system: str
    name: str
    url: str
    model: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    # Whether texts and prefixes of requests with another cache_salt are left out of drafts and caches.
    takes_salt: bool = False
    process: ServerProcess | None = None

    def body(self, question: str, max_tokens: int, temperature: float, salt: str) -> dict[str, Any]:
        """salt: of one run, so that no run finds the answers of another."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": salt} if self.takes_salt else {}),
            **self.fields,
        }


@dataclass(frozen=True)
class Run:
    """seconds: from the first request to the last token. acceptance: None where the server does not report it."""

    seconds: float
    results: Sequence[RequestResult]
    acceptance: Acceptance | None

    @property
    def tokens_per_s(self) -> float:
        return sum(result.num_output_tokens for result in self.results) / self.seconds


async def send(variant: Variant, bodies: Sequence[dict[str, Any]], num_streams: int) -> Run:
    """All requests in their order, at most `num_streams` at a time. Raises PeerError when one fails."""
    gate = asyncio.Semaphore(num_streams)
    # One connection per request: llama-server closes idle ones, which httpx would notice only on the next use.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=variant.url, timeout=TIMEOUT, limits=limits) as client:

        async def one(body: dict[str, Any]) -> RequestResult:
            async with gate:
                return await timed_request(client, CHAT_ENDPOINT, body)

        before = await counted_by_server(client)
        started = time.perf_counter()
        results = await asyncio.gather(*map(one, bodies))
        seconds = time.perf_counter() - started
        for result in results:
            if result.error:
                raise PeerError(f"{variant.system}, {variant.name}: {result.error}")
        after = await counted_by_server(client)
    reported = [result.acceptance for result in results if result.acceptance]
    counted = after - before if before and after else None
    return Run(seconds, results, total(reported) if reported else counted)
