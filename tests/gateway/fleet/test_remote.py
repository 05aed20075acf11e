"""A stream's end as the gateway hears it, over real sockets, when it comes between two writes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from outrider.gateway.fleet.remote import RemoteDrafter, RemoteVerifier
from outrider.shared import rpc, wire
from outrider.shared.errors import DrafterLost, Overloaded, TargetReplaced, VerifierLost
from outrider.shared.messages import DraftStep, Proposal, ProposalReply, SessionSpec, Timings, VerifyStep
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.v1 import drafter_pb2_grpc, verifier_pb2_grpc

_SPEC = SessionSpec("s", 1, (5, 7), (), SamplingParams(), SpeculationMode.EXACT, 0, method="ngram")
_MANY = 300


class _FullVerifier(verifier_pb2_grpc.VerifierServicer):
    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield


class _ReloadedVerifier(verifier_pb2_grpc.VerifierServicer):
    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        await rpc.abort(context, TargetReplaced("the session needs others"))
        yield


class _FullDrafter(drafter_pb2_grpc.DrafterServicer):
    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        yield


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    def add(server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServicer_to_server(_FullVerifier(), server)  # type: ignore[no-untyped-call]
        drafter_pb2_grpc.add_DrafterServicer_to_server(_FullDrafter(), server)  # type: ignore[no-untyped-call]

    server = await rpc.start_server("127.0.0.1", 0, add, ())
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield channel
    await server.drain(0.0)


async def _refusal(channel: grpc.aio.Channel, num_writes: int) -> Exception:
    """What a full verifier's answer becomes when the gateway writes on before it reads."""
    verifier = RemoteVerifier(channel, "there:7001")
    try:
        await verifier.open(_SPEC)
        for _ in range(num_writes):
            await verifier._stream.write(wire.verify_step_to_wire(VerifyStep(1, 0)))
        async for _ in verifier.verify(VerifyStep(1, 0)):
            pass
    except (Overloaded, VerifierLost) as error:
        return error
    finally:
        await verifier.close()
    raise AssertionError("a full verifier has answered")


@pytest.mark.parametrize("num_writes", [0, 1, 5])
async def test_a_refusal_that_meets_a_write_is_told(channel: grpc.aio.Channel, num_writes: int) -> None:
    """grpc.aio then reports INTERNAL in the place of the peer's status: nobody may be taken out of the fleet for it."""
    errors = [await _refusal(channel, num_writes) for _ in range(_MANY)]
    assert {(type(error), str(error)) for error in errors} == {(Overloaded, "full")}


async def test_replaced_weights_are_told_from_a_log_that_refuses() -> None:
    def add(server: grpc.aio.Server) -> None:
        verifier_pb2_grpc.add_VerifierServicer_to_server(_ReloadedVerifier(), server)  # type: ignore[no-untyped-call]

    server = await rpc.start_server("127.0.0.1", 0, add, ())
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        verifier = RemoteVerifier(channel, "there:7001")
        await verifier.open(_SPEC)
        with pytest.raises(TargetReplaced, match="there:7001: the session needs others"):
            await anext(verifier.verify(VerifyStep(1, 0)))
        await verifier.close()
    await server.drain(0.0)


async def test_a_drafter_that_refuses_is_a_lost_one_either_way(channel: grpc.aio.Channel) -> None:
    for _ in range(_MANY):
        with pytest.raises(DrafterLost, match="full"):
            await _asked(RemoteDrafter(channel, "there:7002"))


async def _asked(drafter: RemoteDrafter) -> None:
    try:
        async with asyncio.timeout(30.0):
            await drafter.open(_SPEC)
            await drafter.propose(DraftStep(1, 0, (), num_draft_tokens=2))
    finally:
        await drafter.close()


class _EchoDrafter(drafter_pb2_grpc.DrafterServicer):
    """What a step proposes is where it stands."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    async def Session(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        await anext(requests)
        async for request in requests:
            self.lengths.append(wire.draft_step_from_wire(request.step).committed_len)
            yield wire.proposal_reply_to_wire(ProposalReply(1, Proposal(self.lengths[-1], (7,), "ngram"), Timings()))


async def test_a_question_that_is_given_up_while_it_is_written_does_not_end_the_stream() -> None:
    """How far a write has come after so many turns of the loop is the machine's business: some of these meet one."""
    servicer = _EchoDrafter()

    def add(server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]

    server = await rpc.start_server("127.0.0.1", 0, add, ())
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        drafter = RemoteDrafter(channel, "there:7002")
        await drafter.open(_SPEC)
        for num_turns in range(8):
            given_up = asyncio.create_task(drafter.propose(DraftStep(1, 0, (5,) * 9, 1)))
            for _ in range(num_turns):
                await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
            reply = await asyncio.wait_for(drafter.propose(DraftStep(1, 0, (5, 6), 1)), 60)
            assert (reply.proposal.base_len, servicer.lengths[-1]) == (2, 2)
        assert 9 in servicer.lengths
        await drafter.close()
    await server.drain(0.0)
