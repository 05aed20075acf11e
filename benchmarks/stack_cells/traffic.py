"""The traffic of never_slower_held_out: what is sent in one run of a cell, and what the run scores.

Each kind of traffic is prepared once per cell against a running stack, which gives a run: a function of the draft and
the round that sends the same requests for every draft. Not here: the stacks, the cells and their scores
(never_slower_held_out).
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean, geometric_mean
from typing import Any, Protocol

from benchmarks.load import LoadResult, Request, run_load, run_open_loop, run_requests
from benchmarks.prompts import code_prompts, mixed_prompts, unrepeated_prompts
from benchmarks.turns import Draft, Measured, shape_for, variants
from outrider.client.stack.commands import StackState
from outrider.gateway.fleet.placement import place
from outrider.gateway.fleet.pool import Member
from outrider.shared.messages import VerifierInfo

# streams; those that capacity is measured with. More bring a fifth more tokens/s (docs/benchmarks.md, 16 against 32).
_CAPACITY_STREAMS = 16
# s; how long prompts arrive in an open loop. The number of prompts follows from it and the rate.
_ARRIVALS_S = 2.0
# prompts; the fewest of an open loop, so that a slow machine's score is not that of two or three requests.
_MIN_ARRIVALS = 8

Run = Callable[[Draft, int], Measured]
# A prompt and its temperature.
Ask = tuple[str, float]


class Traffic(Protocol):
    def prepare(self, state: StackState) -> Run:
        """Finds out once what a run needs to know of the stack. The run takes a draft and a round's number."""


@dataclass(frozen=True)
class ClosedLoop:
    """All prompts in their order, `num_streams` at a time. Score: tokens/s."""

    num_streams: int
    max_tokens: int
    asks: tuple[Ask, ...]

    def prepare(self, state: StackState) -> Run:
        def run(draft: Draft, _round_index: int) -> Measured:
            requests = [(prompt, shape_for(draft, self.max_tokens, temperature)) for prompt, temperature in self.asks]
            result = asyncio.run(run_requests(state.url, requests, self.num_streams))
            return Measured(result.tokens_per_s, _token_ids(result))

        return run


@dataclass(frozen=True)
class OpenLoop:
    """Poisson arrivals at a share of the capacity of plain decoding, the same for all variants of a round.

    The arrivals fix tokens/s, so the score is 1 / the mean over requests of seconds per token, waiting included.
    """

    share: float
    max_tokens: int

    def prepare(self, state: StackState) -> Run:
        """Measures capacity: requests per second of closed-loop streams without drafts."""
        off = shape_for(variants("", ())["off"], self.max_tokens)
        prompts = mixed_prompts(2 * _CAPACITY_STREAMS)
        asyncio.run(run_load(state.url, prompts, off, _CAPACITY_STREAMS))  # fills the prefix cache
        capacity = asyncio.run(run_load(state.url, prompts, off, _CAPACITY_STREAMS)).tokens_per_s / self.max_tokens
        rate = self.share * capacity
        arriving = mixed_prompts(max(_MIN_ARRIVALS, round(_ARRIVALS_S * rate)))

        def run(draft: Draft, round_index: int) -> Measured:
            shape, rng = shape_for(draft, self.max_tokens), random.Random(round_index)
            result = asyncio.run(run_open_loop(state.url, arriving, shape, rate, rng))
            return Measured(open_loop_score(result), _token_ids(result))

        return run


@dataclass(frozen=True)
class TwoVerifiers:
    """Each verifier of the stack has streams of its own, pinned to it by cache_salt.

    num_streams, num_prompts: of the first verifier and of the second. Score: the geometric mean of both verifiers'
    tokens/s, so that the slower one counts as much as the faster.
    """

    num_streams: tuple[int, int]
    num_prompts: tuple[int, int]
    max_tokens: int

    def prepare(self, state: StackState) -> Run:
        prompts = mixed_prompts(sum(self.num_prompts))
        parts = (prompts[: self.num_prompts[0]], prompts[self.num_prompts[0] :])
        salted = [
            [(prompt, salt_for(_tokenized(state.url, prompt), address, state.verifiers)) for prompt in part]
            for part, address in zip(parts, state.verifiers, strict=True)
        ]

        def run(draft: Draft, _round_index: int) -> Measured:
            loads = [
                [(prompt, shape_for(draft, self.max_tokens, cache_salt=salt)) for prompt, salt in part]
                for part in salted
            ]
            results = asyncio.run(self._send(state.url, loads))
            score = geometric_mean(result.tokens_per_s for result in results)
            return Measured(score, [token_ids for result in results for token_ids in _token_ids(result)])

        return run

    async def _send(self, url: str, loads: list[list[Request]]) -> list[LoadResult]:
        return await asyncio.gather(*(run_requests(url, *load) for load in zip(loads, self.num_streams, strict=True)))


def open_loop_score(result: LoadResult) -> float:
    """1 / (mean over requests of latency per output token); 1/s."""
    return 1.0 / fmean(request.latency_per_token_s for request in result.requests)


def salt_for(prompt_token_ids: list[int], address: str, addresses: list[str]) -> str:
    """The first cache_salt with which a gateway places the prompt on `address`, one of `addresses`."""
    # Placement looks at addresses and loads only; the loads are 0 here.
    no_channel: Any = None
    members: list[Member[VerifierInfo]] = [Member(known, no_channel) for known in addresses]
    salts = (str(number) for number in itertools.count())
    return next(salt for salt in salts if place(members, prompt_token_ids, salt).address == address)


def greedy(prompts: list[str]) -> tuple[Ask, ...]:
    return tuple((prompt, 0.0) for prompt in prompts)


def greedy_and_sampled(prompts: list[str]) -> tuple[Ask, ...]:
    """Every second prompt at temperature 1."""
    return tuple((prompt, float(place % 2)) for place, prompt in enumerate(prompts))


def code_then_unrepeated(count: int) -> tuple[Ask, ...]:
    """`count` prompts of code, greedy, which draft well; then as many without repetition at temperature 1, whose
    answers do not repeat themselves either.
    """
    return greedy(code_prompts(count)) + tuple((prompt, 1.0) for prompt in unrepeated_prompts(count))


def _tokenized(url: str, prompt: str) -> list[int]:
    """Token ids as the gateway sees them when it places the prompt."""
    body = json.dumps({"prompt": prompt}).encode()
    wanted = urllib.request.Request(f"{url}/tokenize", body, {"content-type": "application/json"})
    with urllib.request.urlopen(wanted, timeout=30) as reply:
        token_ids: list[int] = json.load(reply)["tokens"]
    return token_ids


def _token_ids(result: LoadResult) -> list[list[int]]:
    return [request.token_ids for request in result.requests]
