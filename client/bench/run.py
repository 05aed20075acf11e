"""Sends a benchmark's requests in an open loop: each starts at its arrival time, however many are running.

Not here: one request (request.py), the figures (figures.py), the screen (cli/bench.py).
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

from outrider.client.bench.acceptance import Acceptance, counted_by_server, total
from outrider.client.bench.dataset import BenchPrompt, WordLength, random_prompt, read_prompts
from outrider.client.bench.request import RequestResult, timed_request
from outrider.client.rest import TIMEOUT, headers, server_root
from outrider.shared.errors import OutriderError

CHAT_ENDPOINT = "/v1/chat/completions"
# words; lengths of the two prompts that WordLength is fitted to
_FIT_WORDS = (16, 64)


@dataclass(frozen=True)
class BenchSettings:
    """The settings of a benchmark.

    request_rate: Poisson arrivals per second; inf: all at once. max_concurrency 0: unlimited. Empty method and
    num_speculative_tokens 0: no Outrider fields are sent.
    """

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
    """The results of a benchmark. acceptance None: the server does not report it."""

    results: tuple[RequestResult, ...]
    seconds: float
    acceptance: Acceptance | None


async def run_bench(settings: BenchSettings, on_done: Callable[[RequestResult], None]) -> BenchRun:
    """Runs the benchmark after one unmeasured request. Raises OutriderError when that one fails, ConfigError for a bad
    dataset."""
    # httpx's default of 100 connections would queue requests here, and their wait would count as the server's.
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
        reported = [result.acceptance for result in results if result.acceptance]
        after = None if reported or before is None else await counted_by_server(client)
        counted = after - before if after and before else None
        return BenchRun(tuple(results), seconds, total(reported) if reported else counted)


def arrival_times(num_requests: int, rate: float, rng: random.Random) -> list[float]:
    """Arrival times in seconds from the start: a Poisson process, or all 0."""
    if rate == float("inf"):
        return [0.0] * num_requests
    times, now = [], 0.0
    for _ in range(num_requests):
        times.append(now)
        now += rng.expovariate(rate)
    return times


async def _prompts(client: httpx.AsyncClient, settings: BenchSettings) -> list[BenchPrompt]:
    """Returns num_prompts prompts; a shorter file is repeated."""
    if settings.dataset_path is not None:
        rows = read_prompts(settings.dataset_path, settings.is_chat)
        return [rows[index % len(rows)] for index in range(settings.num_prompts)]
    rng = random.Random(settings.seed)
    num_words = (await _word_length(client, settings, rng)).num_words(settings.random_input_len)
    return [random_prompt(rng, num_words) for _ in range(settings.num_prompts)]


async def _word_length(client: httpx.AsyncClient, settings: BenchSettings, rng: random.Random) -> WordLength:
    """Fitted to the server's usage counts; one token per word where it sends none."""
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
        raise OutriderError(f"the warm-up request failed: {result.error}")


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
