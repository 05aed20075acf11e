"""A client that goes away frees what it held in both services within a second, whenever it goes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from typing import Any

import grpc.aio
import httpx
import pytest
from e2e_rest import speculation
from e2e_stack import RunningStack

from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

# The promise is a second; a machine that stands still for a moment must not fail a test. An output that has come to its
# end by itself is told by its number of tokens.
FREED_WITHIN_S = 10.0
OPEN_TIMEOUT_S = 60.0
# Long enough that the client is always gone before the output ends.
NUM_TOKENS = 2000
# Times that a client tries to be gone before the first token.
MOST_ATTEMPTS = 20
LONG_PROMPT = [7 + place % 3000 for place in range(1900)]
Client = Callable[[RunningStack, dict[str, Any], asyncio.Event], Coroutine[Any, Any, None]]


class OutputEnded(AssertionError):
    """Before the client went away."""


@pytest.fixture(autouse=True)
async def nothing_else_runs(stack: RunningStack) -> AsyncIterator[None]:
    stack.wait_idle()
    yield
    stack.wait_idle()


async def rest_stream(stack: RunningStack, body: dict[str, Any], first_token: asyncio.Event) -> None:
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=120) as http,
        http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply,
    ):
        async for line in reply.aiter_lines():
            if line.startswith("data:"):
                first_token.set()
    raise OutputEnded("the output ended before the client went away")


async def rest_whole(stack: RunningStack, body: dict[str, Any], first_token: asyncio.Event) -> None:
    async with httpx.AsyncClient(base_url=stack.url, timeout=120) as http:
        await http.post("/v1/completions", json=body)
    raise OutputEnded("the output ended before the client went away")


async def grpc_stream(stack: RunningStack, body: dict[str, Any], first_token: asyncio.Event) -> None:
    request = gateway_pb2.GenerateRequest(
        prompt_token_ids=common_pb2.TokenSequence(token_ids=body["prompt"]),
        sampling_params=common_pb2.SamplingParams(max_tokens=body["max_tokens"], ignore_eos=True),
        speculation=common_pb2.Speculation(method=body["speculation"]["method"]),
        cache_salt=body["cache_salt"],
    )
    async with grpc.aio.insecure_channel(stack.state.grpc_address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        async for _ in stub.Generate(request):
            first_token.set()
    raise OutputEnded("the output ended before the client went away")


def _body(prompt: list[int], num_tokens: int, salt: str, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "cache_salt": salt,
        **speculation("draft_model", 3),
        **fields,
    }


async def _sessions(stack: RunningStack) -> tuple[int, int]:
    return await asyncio.to_thread(stack.num_sessions)


async def _until_open(stack: RunningStack, num_sessions: int, client: asyncio.Task[None]) -> None:
    async with asyncio.timeout(OPEN_TIMEOUT_S):
        while await _sessions(stack) != (num_sessions, num_sessions):
            if client.done():
                await client  # raises why


async def _until_blocks_held(stack: RunningStack, client: asyncio.Task[None]) -> None:
    # A session holds its first blocks from its first forward on, a little later than it is open.
    async with asyncio.timeout(OPEN_TIMEOUT_S):
        while (info := await asyncio.to_thread(stack.verifier_info)).num_free_blocks == info.num_blocks:
            assert not client.done(), client.exception()


async def _check_freed(stack: RunningStack, most_tokens: int, tokens_before: float) -> None:
    """In time, and not because the output, `most_tokens` long, has come to its end."""
    started = time.perf_counter()
    async with asyncio.timeout(FREED_WITHIN_S):
        while True:
            verifier = await asyncio.to_thread(stack.verifier_info)
            drafter = await asyncio.to_thread(stack.drafter_info)
            if (verifier.num_sessions, drafter.num_sessions) == (0, 0):
                assert verifier.num_free_blocks == verifier.num_blocks
                break
    print(f"freed after {time.perf_counter() - started:.3f} s")
    assert await _num_tokens(stack) - tokens_before < most_tokens


async def _num_tokens(stack: RunningStack) -> float:
    """All that the gateway has ever emitted."""
    return await asyncio.to_thread(stack.metric, "outrider:generation_tokens_total")


async def _go_away(client: asyncio.Task[None]) -> None:
    client.cancel()
    with suppress(asyncio.CancelledError):
        await client


CLIENTS = pytest.mark.parametrize("client", [rest_stream, rest_whole, grpc_stream])


@CLIENTS
async def test_in_mid_stream(stack: RunningStack, client: Client) -> None:
    num_tokens = await _num_tokens(stack)
    first_token = asyncio.Event()
    task = asyncio.create_task(client(stack, _body([5, 6, 7], NUM_TOKENS, "mid"), first_token))
    await _until_open(stack, 1, task)
    if client is not rest_whole:
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await first_token.wait()
    await _until_blocks_held(stack, task)
    await _go_away(task)
    await _check_freed(stack, NUM_TOKENS, num_tokens)


@CLIENTS
async def test_before_the_first_token(stack: RunningStack, client: Client) -> None:
    for attempt in range(MOST_ATTEMPTS):
        num_tokens = await _num_tokens(stack)
        first_token = asyncio.Event()
        # A salt of its own: a prompt found in the prefix cache would be through before the client can go away.
        body = _body(LONG_PROMPT, 100, f"first-{client.__name__}-{attempt}")
        task = asyncio.create_task(client(stack, body, first_token))
        was_before = False
        with suppress(OutputEnded):
            await _until_open(stack, 1, task)
            was_before = not first_token.is_set()
            await _go_away(task)
        if was_before:
            await _check_freed(stack, 100, num_tokens)
            return
        await asyncio.to_thread(stack.wait_idle)
    raise AssertionError("the first token was always there before the client could go away")


async def test_all_choices_of_a_request(stack: RunningStack) -> None:
    num_tokens = await _num_tokens(stack)
    first_token = asyncio.Event()
    body = _body([5, 6, 7], NUM_TOKENS, "choices", n=4, temperature=1)
    task = asyncio.create_task(rest_stream(stack, body, first_token))
    await _until_open(stack, 4, task)
    await _go_away(task)
    await _check_freed(stack, 4 * NUM_TOKENS, num_tokens)


async def test_a_client_that_stays_is_not_disturbed(stack: RunningStack, http: httpx.AsyncClient) -> None:
    body = _body([5, 6, 7], 64, "stays", return_token_ids=True)
    alone = (await http.post("/v1/completions", json=body)).json()["choices"][0]["token_ids"]
    staying = asyncio.create_task(http.post("/v1/completions", json=body))
    for _ in range(4):
        first_token = asyncio.Event()
        leaving = asyncio.create_task(rest_stream(stack, _body([9, 8], NUM_TOKENS, "leaves"), first_token))
        async with asyncio.timeout(OPEN_TIMEOUT_S):
            await first_token.wait()
        await _go_away(leaving)
    assert (await staying).json()["choices"][0]["token_ids"] == alone
