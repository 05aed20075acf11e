"""Drives a gateway through REST and times what a client sees."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx

from outrider.client.rest import parse_event


@dataclass(frozen=True)
class Shape:
    """The request that a measurement sends again and again."""

    max_tokens: int
    method: str = "off"
    num_speculative_tokens: int = 0
    temperature: float = 0.0
    seed: int | None = None
    mode: str | None = None
    token_tree: bool = False
    # 0: stop tokens are said and decoding continues. Else they cannot be said before, as in transformers and llama.cpp.
    min_tokens: int = 0
    # Empty: none. Part of what the gateway places sessions by, and of the prefix cache's key.
    cache_salt: str = ""


# A prompt and what is asked for it.
Request = tuple[str, Shape]


@dataclass
class RequestTimes:
    num_tokens: int = 0
    first_token_s: float = 0.0
    # Seconds between updates, divided among the tokens that each brought.
    gaps_s: list[float] = field(default_factory=list)
    # Seconds between updates, from the first token on.
    pieces_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    mean_acceptance_length: float = 0.0

    @property
    def latency_per_token_s(self) -> float:
        """Seconds from sending the request to its last token, per output token: waiting and prefill included."""
        return (self.first_token_s + sum(self.pieces_s)) / self.num_tokens


@dataclass
class LoadResult:
    seconds: float
    requests: list[RequestTimes]

    @property
    def tokens_per_s(self) -> float:
        return sum(request.num_tokens for request in self.requests) / self.seconds


async def run_load(url: str, prompts: list[str], shape: Shape, concurrency: int) -> LoadResult:
    """All prompts, at most `concurrency` at a time, streamed."""
    return await run_requests(url, [(prompt, shape) for prompt in prompts], concurrency)


async def run_requests(url: str, requests: Sequence[Request], concurrency: int) -> LoadResult:
    """Closed loop: all requests in their order, at most `concurrency` at a time, streamed."""
    gate = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=url, timeout=600) as client:

        async def one(prompt: str, shape: Shape) -> RequestTimes:
            async with gate:
                return await _stream(client, prompt, shape)

        started = time.perf_counter()
        times = await asyncio.gather(*(one(prompt, shape) for prompt, shape in requests))
        return LoadResult(time.perf_counter() - started, list(times))


async def run_open_loop(url: str, prompts: list[str], shape: Shape, rate: float, rng: random.Random) -> LoadResult:
    """Open loop: the prompts arrive in their order as a Poisson process, whether or not earlier ones are answered.

    rate: requests per second. Equal states of `rng` give equal arrivals.
    """
    # No limit on connections: a request that waits for one would have arrived later than it should.
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:

        async def one(prompt: str, arrival_s: float) -> RequestTimes:
            await asyncio.sleep(arrival_s)
            return await _stream(client, prompt, shape)

        started = time.perf_counter()
        arrivals_s = arrival_times(len(prompts), rate, rng)
        times = await asyncio.gather(*map(one, prompts, arrivals_s))
        return LoadResult(time.perf_counter() - started, list(times))


def arrival_times(count: int, rate: float, rng: random.Random) -> list[float]:
    """Seconds from the start to each arrival of a Poisson process of `rate` arrivals per second; the first is at 0."""
    gaps_s = (rng.expovariate(rate) for _ in range(count - 1))
    return list(accumulate(gaps_s, initial=0.0))[:count]


def run_for(url: str, prompts: list[str], shape: Shape, concurrency: int, seconds: float) -> None:
    """All prompts once, and again until so much time has passed: fills the prefix cache, and lets `auto` learn."""
    until = time.monotonic() + seconds
    asyncio.run(run_load(url, prompts, shape, concurrency))
    while time.monotonic() < until:
        asyncio.run(run_load(url, prompts, shape, concurrency))


async def _stream(client: httpx.AsyncClient, prompt: str, shape: Shape) -> RequestTimes:
    speculation: dict[str, Any] = {"method": shape.method, "num_speculative_tokens": shape.num_speculative_tokens}
    if shape.token_tree:
        speculation["token_tree"] = True
    if shape.mode:
        speculation["mode"] = shape.mode
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": shape.max_tokens,
        "temperature": shape.temperature,
        "seed": shape.seed,
        "ignore_eos": not shape.min_tokens,
        "min_tokens": shape.min_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "speculation": speculation,
    }
    if shape.cache_salt:
        body["cache_salt"] = shape.cache_salt
    times = RequestTimes()
    started = last = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"HTTP {response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            chunk = parse_event(line)
            if chunk is None:
                continue
            now = time.perf_counter()
            if chunk["choices"]:
                token_ids = chunk["choices"][0].get("token_ids") or []
                if token_ids:
                    _add(times, token_ids, now - started, now - last)
                    last = now
            figures = (chunk.get("metrics") or {}).get("speculative_decoding")
            if figures:
                times.mean_acceptance_length = figures["mean_acceptance_length"] or 0.0
    return times


def _add(times: RequestTimes, token_ids: list[int], since_start_s: float, since_last_s: float) -> None:
    if times.num_tokens == 0:
        times.first_token_s = since_start_s
    else:
        times.pieces_s.append(since_last_s)
        times.gaps_s.extend([since_last_s / len(token_ids)] * len(token_ids))
    times.num_tokens += len(token_ids)
    times.token_ids.extend(token_ids)
