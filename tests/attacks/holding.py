"""Attacks that hold places instead of costing work, and a neighbour's short requests while they hold them.

Each opens more than the gateway has places for, of one key, and keeps it open: bodies that never end, responses in the
background, gRPC calls without a message, at the gateway, the verifier and the drafter. Receipts do cost work.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx

from outrider.shared import rpc
from outrider.v1 import common_pb2 as common
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc
from tests.attacks.stack import AttackedStack

# requests of the neighbour, over each of HTTP and gRPC, and how many of them at a time
NUM_INNOCENTS, _NUM_AT_A_TIME = 18, 3
# seconds; until one of many receipts is confirmed, on a slow machine
_CONFIRM_S = 120.0
_NUM_TOKENS = 4
# requests of the attacker in the background; all places of the gateway before callers had shares
_NUM_BACKGROUND = 512
_TIMEOUT_S = 120.0

Hold = Callable[[AttackedStack, Counter[str]], AbstractAsyncContextManager[None]]


@dataclass(frozen=True)
class HoldOutcome:
    """refused: by status, of 2 * NUM_INNOCENTS. p50_s, slowest_s: of those that were served. attackers: what became of
    the attacker's requests, and of what it did afterwards.
    """

    name: str
    refused: Counter[str]
    p50_s: float
    slowest_s: float
    attackers: Counter[str]


async def run_holds(stack: AttackedStack, tell: Callable[[str], None]) -> list[HoldOutcome]:
    """tell: gets the name of what begins."""
    outcomes = []
    for name, hold in HOLDS.items():
        if name == _AT_THE_DRAFTER and not stack.state.drafters:
            continue
        tell(name)
        attackers: Counter[str] = Counter()
        async with hold(stack, attackers):
            outcomes.append(await innocents_beside(stack, name, attackers))
    return outcomes


async def innocents_beside(stack: AttackedStack, name: str, attackers: Counter[str]) -> HoldOutcome:
    """Sends the neighbour's short requests, over HTTP and gRPC, while something else goes on."""
    refused: Counter[str] = Counter()
    seconds: list[float] = []
    turns = asyncio.Semaphore(_NUM_AT_A_TIME)

    async def one(send: Callable[[], Any]) -> None:
        async with turns:
            started = time.monotonic()
            failure = await send()
            if failure:
                refused[failure] += 1
            else:
                seconds.append(time.monotonic() - started)

    metadata = (("authorization", f"Bearer {stack.neighbour_key}"),)
    request = pb.GenerateRequest(prompt="innocent", sampling_params=common.SamplingParams(max_tokens=_NUM_TOKENS))
    async with http_client(stack, stack.neighbour_key) as http, rpc.open_channel(stack.state.grpc_address) as channel:
        stub: Any = pb_grpc.GatewayStub(channel)

        async def over_http() -> str:
            try:
                answer = await http.post("/v1/completions", json={"prompt": "innocent", "max_tokens": _NUM_TOKENS})
            except httpx.TransportError as error:
                return type(error).__name__
            return "" if answer.status_code == httpx.codes.OK else str(answer.status_code)

        async def over_grpc() -> str:
            try:
                async for _ in stub.Generate(request, metadata=metadata, timeout=_TIMEOUT_S):
                    pass
            except grpc.aio.AioRpcError as error:
                return f"{error.code().name} {error.details()}"
            return ""

        await asyncio.gather(*(one(send) for send in (over_http, over_grpc) * NUM_INNOCENTS))
    seconds = sorted(seconds) or [float("inf")]
    return HoldOutcome(name, refused, seconds[len(seconds) // 2], seconds[-1], attackers)


def http_client(stack: AttackedStack, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=stack.state.url,
        headers={"Authorization": f"Bearer {key}"},
        timeout=_TIMEOUT_S,
        # Not kept: a server closes idle connections, perhaps while the next request is on its way.
        limits=httpx.Limits(max_connections=64, max_keepalive_connections=0),
    )


@asynccontextmanager
async def _nothing(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
    yield


def _half_sent_bodies(num_connections: int) -> Hold:
    """Connections whose request has a head, and ten bytes of a body of a thousand."""

    @asynccontextmanager
    async def hold(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
        address = httpx.URL(stack.state.url)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nhost: {address.host}\r\ncontent-type: application/json\r\n"
            f"authorization: Bearer {stack.attacker_key}\r\ncontent-length: 1000\r\n\r\n"
        ).encode()
        writers = []
        for _ in range(num_connections):
            _, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(head + b'{"prompt":')
            writers.append(writer)
        attackers["half sent"] += len(writers)
        await asyncio.sleep(1.0)  # the last of them have been read
        yield
        for writer in writers:
            writer.transport.abort()

    return hold


@asynccontextmanager
async def _background_responses(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
    """More than the engine works off meanwhile; the owner then cancels all of them."""
    body = {"input": "A?", "background": True, "max_output_tokens": 400, "temperature": 0}
    async with http_client(stack, stack.attacker_key) as http:
        asked = (http.post("/v1/responses", json=body) for _ in range(_NUM_BACKGROUND))
        answers = await asyncio.gather(*asked, return_exceptions=True)  # a connection beyond its share is closed
        attackers.update(f"begun {_outcome(answer)}" for answer in answers)
        yield
        begun = [answer.json()["id"] for answer in answers if _outcome(answer) == str(httpx.codes.OK)]
        ended = await asyncio.gather(
            *(http.post(f"/v1/responses/{one}/cancel") for one in begun), return_exceptions=True
        )
        attackers.update(f"cancelled {_outcome(answer)}" for answer in ended)


@asynccontextmanager
async def _receipts(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
    """One answer of half a megabyte, verified again and again on 32 connections."""
    wanted = {"messages": [{"role": "user", "content": "A?"}], "max_tokens": 500, "ignore_eos": True, "receipt": True}
    headers = {"content-type": "application/json"}
    async with http_client(stack, stack.attacker_key) as http:
        told = {"temperature": 1.0, "seed": 1, "logprobs": True, "top_logprobs": 20}
        answer = (await http.post("/v1/chat/completions", json={**wanted, **told})).content
        has_confirmed = asyncio.Event()

        async def verify() -> None:
            while True:
                reply = await http.post("/v1/receipts/verify", content=answer, headers=headers)
                is_confirmed = reply.status_code == httpx.codes.OK and reply.json()["confirmed"]
                attackers["confirmed" if is_confirmed else str(reply.status_code)] += 1
                if is_confirmed:
                    has_confirmed.set()

        verifying = [asyncio.create_task(verify()) for _ in range(32)]
        await asyncio.sleep(1.0)  # all have been sent
        yield
        await asyncio.wait_for(has_confirmed.wait(), _CONFIRM_S)
        for task in verifying:
            task.cancel()
        await asyncio.gather(*verifying, return_exceptions=True)


def _outcome(answer: httpx.Response | BaseException) -> str:
    return str(answer.status_code) if isinstance(answer, httpx.Response) else type(answer).__name__


def _calls_without_a_message(
    method: str, num_calls: int, address_of: Callable[[AttackedStack], str], num_channels: int = 1
) -> Hold:
    @asynccontextmanager
    async def hold(stack: AttackedStack, attackers: Counter[str]) -> AsyncIterator[None]:
        metadata = (("authorization", f"Bearer {stack.attacker_key}"),)
        async with AsyncExitStack() as channels:
            calls = []
            for place in range(num_channels):
                options = (("grpc.use_local_subchannel_pool", 1), ("place", place))  # a connection of its own
                channel = await channels.enter_async_context(
                    grpc.aio.insecure_channel(address_of(stack), options=options)
                )
                open_call: Any = channel.stream_stream(method)
                calls += [open_call(metadata=metadata) for _ in range(num_calls // num_channels)]
            await asyncio.sleep(2.0)
            yield
            for call in calls:
                status = await call.code() if call.done() else None
                attackers["open" if status is None else status.name] += 1
                call.cancel()

    return hold


def _gateway(stack: AttackedStack) -> str:
    return stack.state.grpc_address


def _verifier(stack: AttackedStack) -> str:
    return stack.state.verifiers[0]


def _drafter(stack: AttackedStack) -> str:
    return stack.state.drafters[0]


_AT_THE_DRAFTER = "2,000 at the drafter"
HOLDS: dict[str, Hold] = {
    "nothing": _nothing,
    "515 half-sent bodies": _half_sent_bodies(515),
    "1,100 half-sent bodies": _half_sent_bodies(1100),
    "512 responses in the background": _background_responses,
    "32 receipts at a time": _receipts,
    "900 gRPC calls without a message": _calls_without_a_message("/outrider.v1.Gateway/Generate", 900, _gateway),
    "900 health checks without a message": _calls_without_a_message("/grpc.health.v1.Health/Check", 900, _gateway),
    "2,000 of them on 8 connections": _calls_without_a_message("/outrider.v1.Gateway/Generate", 2000, _gateway, 8),
    "2,000 at the verifier": _calls_without_a_message("/outrider.v1.Verifier/Session", 2000, _verifier),
    _AT_THE_DRAFTER: _calls_without_a_message("/outrider.v1.Drafter/Session", 2000, _drafter),
}
