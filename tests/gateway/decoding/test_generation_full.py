"""How often outputs ask a verifier that is full, over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import MAX_ASKING_AGAIN, OVERLOADED_WAIT_S, Generation
from outrider.gateway.fleet.pool import Member, Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.request.types import ChoiceStart, ValidRequest
from outrider.shared import rpc
from outrider.shared.errors import Overloaded, Unavailable
from outrider.shared.messages import DrafterInfo
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.shared.speculative_config import parse_speculative_config
from outrider.v1 import verifier_pb2_grpc
from tests.gateway.decoding.test_generation_starts import Log
from tests.gateway.small_tokenizers import byte_fallback_tokenizer
from tests.gateway.verifier_fleet import Fleet, verifier_info

_NUM_OUTPUTS = 16
_SECONDS = 1.0


class _FullVerifier(verifier_pb2_grpc.VerifierServicer):
    """asked: the outputs' names, in order."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        self.asked.append((await anext(requests)).open.session_id)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield


async def _nobody(channel: object, timeout_s: float) -> DrafterInfo:
    raise Unavailable("there is none")


@pytest.fixture
async def full() -> AsyncIterator[tuple[_FullVerifier, Generation]]:
    verifier = _FullVerifier()

    def add(server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServicer_to_server(verifier, server)  # type: ignore[no-untyped-call]

    server = await rpc.start_server("127.0.0.1", 0, add, ())
    address = f"127.0.0.1:{server.port}"
    async with rpc.open_channel(address) as channel:
        info = replace(verifier_info(), max_sessions=2 * _NUM_OUTPUTS)
        yield (
            verifier,
            Generation(
                config=GatewayConfig(failover_s=_SECONDS),
                speculative=parse_speculative_config(""),
                tokenizer=byte_fallback_tokenizer(),
                verifiers=Fleet([Member(address, channel, info, healthy=True)]),
                drafters=Pool("drafter", (), _nobody),
                metrics=GatewayMetrics(CollectorRegistry()),
            ),
        )
    await server.drain(0.0)


async def test_a_full_verifier_is_asked_in_turn(full: tuple[_FullVerifier, Generation]) -> None:
    verifier, generation = full
    started = time.monotonic()

    async def run(name: str) -> None:
        starts = (ChoiceStart(0, SpeculationMode.EXACT, 0, Log()),)
        request = ValidRequest(name, (65,), SamplingParams(max_tokens=2), starts=starts, caller=name)
        with suppress(Overloaded):
            async for _ in generation.generate(request):
                raise AssertionError("a full verifier has answered")

    await asyncio.gather(*(run(f"r{place}") for place in range(_NUM_OUTPUTS)))
    num_turns = MAX_ASKING_AGAIN * (time.monotonic() - started) / OVERLOADED_WAIT_S
    again = verifier.asked[_NUM_OUTPUTS:]
    assert len(again) <= num_turns + MAX_ASKING_AGAIN
    assert set(again[:_NUM_OUTPUTS]) == set(verifier.asked)  # none asks twice before all others have
