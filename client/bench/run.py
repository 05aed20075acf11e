"""Sends the requests of a benchmark, open loop: they start when their time has come, however many are running.

Not here: one request (request.py), what the figures mean (figures.py), the screen (cli_bench.py).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from client.bench.acceptance import Acceptance, counted_by_server, total
from client.bench.dataset import BenchPrompt, WordLength, random_prompt, read_prompts
from client.bench.request import RequestResult, timed_request
from client.rest import TIMEOUT, headers, server_root
from shared.errors import OutriderError

CHAT_ENDPOINT = "/v1/chat/completions"
# Words of the two prompts that show how many tokens the server makes of a word.
_FIT_WORDS = (16, 64)


@dataclass(frozen=True)
class BenchSettings:
    """request_rate: per second, Poisson; infinite: all at once. max_concurrency 0: no bound. Empty method and 0
    num_speculative_tokens: nothing of Outrider's own is sent."""

    base_url: str
    model: str
    endpoint: str = "/v1/completions"
    num_prompts: int = 100
    request_rate: float = float("inf")
    max_concurrency: int = 0
    random_input_len: int = 128
    random_output_len: int = 64
    dataset_path: Path | None = None
    seed: int = 0
    temperature: float = 0.0
    ignore_eos: bool = False
    api_key: str = ""
    method: str = ""
    num_speculative_tokens: int = 0

    @property
    def is_chat(self) -> bool:
        return self.endpoint.endswith("/chat/completions")

    def body(self, prompt: BenchPrompt) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            **prompt.fields(self.is_chat),
            "max_tokens": prompt.max_tokens or self.random_output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.method or self.num_speculative_tokens:
            body["speculation"] = {"method": self.method or "auto"}
            if self.num_speculative_tokens:
                body["speculation"]["num_speculative_tokens"] = self.num_speculative_tokens
        return body


@dataclass(frozen=True)
class BenchRun:
    """acceptance None: the server does not tell."""

    results: tuple[RequestResult, ...]
    seconds: float
    acceptance: Acceptance | None


async def run_bench(settings: BenchSettings, on_done: Callable[[RequestResult], None]) -> BenchRun:
    """Warms up first, uncounted. Raises OutriderError when not even that works, ConfigError for a wrong file."""
    # Not httpx's bound of 100 connections: requests would wait here and be timed as if the server were slow.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=server_root(settings.base_url), headers=headers(settings.api_key), limits=limits, timeout=TIMEOUT
    ) as client:
        prompts = await _prompts(client, settings)
        await _warm_up(client, settings, prompts[0])
        before = await counted_by_server(client)
        started = time.perf_counter()
        results = await _send_all(client, settings, prompts, on_done)
        seconds = time.perf_counter() - started
        told = [result.acceptance for result in results if result.acceptance]
        after = None if told or before is None else await counted_by_server(client)
        counted = after - before if after and before else None
        return BenchRun(tuple(results), seconds, total(told) if told else counted)


def arrival_times(num_requests: int, rate: float, rng: random.Random) -> list[float]:
    """Seconds from the start at which requests arrive: a Poisson process, or all at once."""
    if rate == float("inf"):
        return [0.0] * num_requests
    times, now = [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def _prompts(client: httpx.AsyncClient, settings: BenchSettings) -> list[BenchPrompt]:
    """num_prompts of them; a shorter file is gone through again."""
    if settings.dataset_path is not None:
        rows = read_prompts(settings.dataset_path, settings.is_chat)
        return [rows[index % len(rows)] for index in range(settings.num_prompts)]
    rng = random.Random(settings.seed)
    num_words = (await _word_length(client, settings, rng)).num_words(settings.random_input_len)
    return [random_prompt(rng, num_words) for _ in range(settings.num_prompts)]


async def _word_length(client: httpx.AsyncClient, settings: BenchSettings, rng: random.Random) -> WordLength:
    """As the server counts; one token per word where it does not say."""
    found = []
    for num_words in _FIT_WORDS:
        body = {**settings.body(random_prompt(rng, num_words)), "max_tokens": 1}
        result = await timed_request(client, settings.endpoint, body)
        if result.num_prompt_tokens is None:
            return WordLength()
        found.append((num_words, result.num_prompt_tokens))
    return WordLength.fit(*found)


async def _warm_up(client: httpx.AsyncClient, settings: BenchSettings, prompt: BenchPrompt) -> None:
    result = await timed_request(client, settings.endpoint, settings.body(prompt))
    if result.error:
        raise OutriderError(f"the first request, a trial, failed: {result.error}")


async def _send_all(
    client: httpx.AsyncClient,
    settings: BenchSettings,
    prompts: list[BenchPrompt],
    on_done: Callable[[RequestResult], None],
) -> list[RequestResult]:
    gate = asyncio.Semaphore(settings.max_concurrency) if settings.max_concurrency else nullcontext()

    async def one(prompt: BenchPrompt, delay_s: float) -> RequestResult:
        await asyncio.sleep(delay_s)
        async with gate:
            result = await timed_request(client, settings.endpoint, settings.body(prompt))
        on_done(result)
        return result

    delays = arrival_times(len(prompts), settings.request_rate, random.Random(settings.seed))
    return await asyncio.gather(*(one(prompt, delay_s) for prompt, delay_s in zip(prompts, delays, strict=True)))
