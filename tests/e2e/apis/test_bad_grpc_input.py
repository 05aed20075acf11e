"""Malformed gRPC: the call ends with a status and a reason, and the sessions beside it go on."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
import grpc.aio
import pytest
from e2e_grpc import (
    DRAFTER_SESSION,
    VERIFIER_SESSION,
    call_raw,
    call_unary,
    draft,
    drafter_bystander,
    open_drafter,
    open_verifier,
    verifier_bystander,
    verify,
)
from e2e_stack import RunningStack

from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

INVALID = grpc.StatusCode.INVALID_ARGUMENT
EXACT = common_pb2.SPECULATION_MODE_EXACT
REJECTION = common_pb2.SPECULATION_MODE_REJECTION
# A field of wire type 7, which does not exist.
GARBAGE = b"\xff\xff\xff\xff\xff\x0f\x07"
Messages = Sequence[bytes]


@pytest.fixture(scope="module")
async def verifier(stack: RunningStack) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(stack.state.verifiers[0]) as channel:
        yield channel


@pytest.fixture(scope="module")
async def drafter(stack: RunningStack) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(stack.state.drafters[0]) as channel:
        yield channel


@pytest.fixture(scope="module")
async def gateway(stack: RunningStack) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(stack.state.grpc_address) as channel:
        yield channel


def params(**changes: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"temperature": 1.0, "max_tokens": 16, **changes})


def law(token_ids: Sequence[int], counts: Sequence[int]) -> common_pb2.SparseLaw:
    return common_pb2.SparseLaw(token_ids=token_ids, counts=counts)


def proposing(**fields: Any) -> Messages:
    """A good session in rejection mode, then a step with this proposal at its start."""
    opened = open_verifier(mode=REJECTION, sampling_params=params())
    return [opened, verify(proposal=common_pb2.Proposal(**{"method": "test", **fields}))]


BAD_VERIFIER_SESSIONS: dict[str, tuple[Messages, grpc.StatusCode, str]] = {
    "garbage": ([GARBAGE], INVALID, "broken protobuf"),
    "garbage-after-open": ([open_verifier(), GARBAGE], INVALID, "broken protobuf"),
    "nothing": ([], INVALID, "before it sent a request"),
    "empty-message": ([b""], INVALID, "open"),
    "step-first": ([verify()], INVALID, "open"),
    "open-twice": ([open_verifier(), open_verifier()], INVALID, "step"),
    "no-session-id": ([open_verifier(session_id="")], INVALID, "session_id"),
    "no-prompt": ([open_verifier(prompt_token_ids=[])], INVALID, "prompt_token_ids"),
    "no-mode": ([open_verifier(mode=0)], INVALID, "mode"),
    "prompt-id-too-big": ([open_verifier(prompt_token_ids=[5, 4096])], INVALID, "prompt"),
    "prompt-id-negative": ([open_verifier(prompt_token_ids=[-1])], INVALID, "prompt"),
    "committed-id-too-big": ([open_verifier(committed_token_ids=[2**31 - 1])], INVALID, "committed"),
    "prompt-too-long": ([open_verifier(prompt_token_ids=[5] * 4000)], INVALID, "context"),
    "bad-temperature": ([open_verifier(sampling_params=params(temperature=-1))], INVALID, "temperature"),
    "nan-temperature": ([open_verifier(sampling_params=params(temperature=float("nan")))], INVALID, "temperature"),
    "bad-top-p": ([open_verifier(sampling_params=params(top_p=7))], INVALID, "top_p"),
    "bad-max-tokens": ([open_verifier(sampling_params=params(max_tokens=-5))], INVALID, "max_tokens"),
    "bad-stop-id": ([open_verifier(sampling_params=params(stop_token_ids=[4096]))], INVALID, "stop_token_ids"),
    "bad-bias-id": ([open_verifier(sampling_params=params(logit_bias={-1: 1.0}))], INVALID, "logit_bias"),
    "hidden-layer-too-big": ([open_verifier(), verify(hidden_states={"layers": [99]})], INVALID, "layer 99"),
    "hidden-layer-twice": ([open_verifier(), verify(hidden_states={"layers": [1, 1]})], INVALID, "hidden_states"),
    "hidden-without-layers": ([open_verifier(), verify(hidden_states={"layers": []})], INVALID, "hidden_states"),
    "gap": ([open_verifier(), verify(base_len=5)], INVALID, "base_len"),
    "negative-base": ([open_verifier(), verify(base_len=-1)], INVALID, "base_len"),
    "negative-budget": ([open_verifier(), verify(max_new_tokens=-1)], INVALID, "max_new_tokens"),
    "wrong-epoch": ([open_verifier(epoch=3), verify(epoch=2)], grpc.StatusCode.ABORTED, "epoch"),
    "draft-id-too-big": (proposing(token_ids=[5, 4096]), INVALID, "vocabulary"),
    "draft-id-negative": (proposing(token_ids=[-7]), INVALID, "vocabulary"),
    "parent-after-child": (proposing(token_ids=[5, 6], parents=[1, -1]), INVALID, "parent"),
    "parent-of-itself": (proposing(token_ids=[5, 6], parents=[-1, 1]), INVALID, "parent"),
    "parent-below-root": (proposing(token_ids=[5], parents=[-2]), INVALID, "parent"),
    "too-few-parents": (proposing(token_ids=[5, 6], parents=[-1]), INVALID, "parents"),
    "law-does-not-sum": (
        proposing(token_ids=[5], laws=[law([5, 6], [65536, 1])], law_total=65536),
        INVALID,
        "sum",
    ),
    "law-of-another-total": (proposing(token_ids=[5], laws=[law([5], [100])], law_total=100), INVALID, "law_total"),
    "law-without-its-token": (proposing(token_ids=[5], laws=[law([6], [65536])], law_total=65536), INVALID, "mass"),
    "law-counts-missing": (proposing(token_ids=[5], laws=[law([5, 6], [65536])], law_total=65536), INVALID, "law"),
    "law-names-twice": (proposing(token_ids=[5], laws=[law([5, 5], [65535, 1])], law_total=65536), INVALID, "twice"),
    "law-id-too-big": (
        proposing(token_ids=[5], laws=[law([5, 9999], [65535, 1])], law_total=65536),
        INVALID,
        "vocabulary",
    ),
    "too-few-laws": (proposing(token_ids=[5, 6], laws=[law([5], [65536])], law_total=65536), INVALID, "laws"),
    "confidence-too-long": (proposing(token_ids=[5], confidence=b"abc"), INVALID, "confidence"),
    "siblings-of-different-laws": (
        proposing(token_ids=[5, 6], parents=[-1, -1], laws=[law([5], [65536]), law([6], [65536])], law_total=65536),
        INVALID,
        "different laws",
    ),
}
BAD_DRAFTER_SESSIONS: dict[str, tuple[Messages, grpc.StatusCode, str]] = {
    "garbage": ([GARBAGE], INVALID, "broken protobuf"),
    "garbage-after-open": ([open_drafter(), GARBAGE], INVALID, "broken protobuf"),
    "nothing": ([], INVALID, "before it sent a request"),
    "step-first": ([draft(num_draft_tokens=2)], INVALID, "open"),
    "open-twice": ([open_drafter(), open_drafter()], INVALID, "step"),
    "unknown-method": ([open_drafter(method="crystal_ball")], INVALID, "method"),
    "no-method": ([open_drafter(method="")], INVALID, "method"),
    "no-prompt": ([open_drafter(prompt_token_ids=[])], INVALID, "prompt_token_ids"),
    "prompt-id-too-big": ([open_drafter(prompt_token_ids=[5, 4096]), draft(num_draft_tokens=2)], INVALID, "vocab"),
    "prompt-id-negative": ([open_drafter(prompt_token_ids=[-1]), draft(num_draft_tokens=2)], INVALID, "vocab"),
    "long-prompt-id-too-big": (
        [open_drafter(prompt_token_ids=[5] * 300 + [99999]), draft(num_draft_tokens=2)],
        INVALID,
        "vocab",
    ),
    "committed-id-too-big": (
        [open_drafter(), draft(committed_token_ids=[4096], num_draft_tokens=2)],
        INVALID,
        "committed_token_ids",
    ),
    "committed-id-negative": (
        [open_drafter(), draft(committed_token_ids=[-1], num_draft_tokens=2)],
        INVALID,
        "committed_token_ids",
    ),
    "opened-with-committed-id-too-big": (
        [open_drafter(committed_token_ids=[4096]), draft(base_len=1, num_draft_tokens=2)],
        INVALID,
        "vocab",
    ),
    "gap": ([open_drafter(), draft(base_len=3, num_draft_tokens=2)], INVALID, "base_len"),
    "negative-base": ([open_drafter(), draft(base_len=-1, num_draft_tokens=2)], INVALID, "base_len"),
    "negative-length": ([open_drafter(), draft(num_draft_tokens=-3)], INVALID, "num_draft_tokens"),
    "wrong-epoch": ([open_drafter(epoch=1), draft(num_draft_tokens=2)], grpc.StatusCode.ABORTED, "epoch"),
    "bad-params": ([open_drafter(sampling_params=params(top_p=-1))], INVALID, "top_p"),
}


@pytest.mark.parametrize("case", BAD_VERIFIER_SESSIONS)
async def test_verifier_refuses_and_others_go_on(verifier: grpc.aio.Channel, case: str) -> None:
    messages, code, fragment = BAD_VERIFIER_SESSIONS[case]
    async with verifier_bystander(verifier):
        ended = await call_raw(verifier, VERIFIER_SESSION, messages)
    assert (ended.code, fragment in ended.details) == (code, True), ended


@pytest.mark.parametrize("case", BAD_DRAFTER_SESSIONS)
async def test_drafter_refuses_and_others_go_on(drafter: grpc.aio.Channel, case: str) -> None:
    messages, code, fragment = BAD_DRAFTER_SESSIONS[case]
    async with drafter_bystander(drafter):
        ended = await call_raw(drafter, DRAFTER_SESSION, messages)
    assert (ended.code, fragment in ended.details) == (code, True), ended


@pytest.mark.parametrize("service", ["Verifier", "Drafter", "Gateway"])
async def test_unknown_method(
    verifier: grpc.aio.Channel, drafter: grpc.aio.Channel, gateway: grpc.aio.Channel, service: str
) -> None:
    channel = {"Verifier": verifier, "Drafter": drafter, "Gateway": gateway}[service]
    ended = await call_unary(channel, f"/outrider.v1.{service}/Nothing", b"")
    assert ended.code is grpc.StatusCode.UNIMPLEMENTED
    assert ended.details


BAD_GENERATES: dict[str, tuple[gateway_pb2.GenerateRequest, grpc.StatusCode, str]] = {
    "no-input": (gateway_pb2.GenerateRequest(), INVALID, "prompt"),
    "empty-prompt": (gateway_pb2.GenerateRequest(prompt=""), INVALID, "prompt"),
    "no-messages": (gateway_pb2.GenerateRequest(messages=gateway_pb2.ChatMessages()), INVALID, "messages"),
    "model": (gateway_pb2.GenerateRequest(prompt="a", model="gpt-4"), grpc.StatusCode.NOT_FOUND, "model"),
    "token-id": (
        gateway_pb2.GenerateRequest(prompt_token_ids=common_pb2.TokenSequence(token_ids=[4096])),
        INVALID,
        "prompt_token_ids",
    ),
    "too-long": (gateway_pb2.GenerateRequest(prompt="x " * 5000), INVALID, "context"),
    "temperature": (
        gateway_pb2.GenerateRequest(prompt="a", sampling_params=params(temperature=-2)),
        INVALID,
        "temperature",
    ),
    "max-tokens": (gateway_pb2.GenerateRequest(prompt="a", sampling_params=params(max_tokens=-2)), INVALID, "max_tok"),
    "method": (
        gateway_pb2.GenerateRequest(prompt="a", speculation=common_pb2.Speculation(method="crystal_ball")),
        INVALID,
        "speculation.method",
    ),
    "draft-length": (
        gateway_pb2.GenerateRequest(prompt="a", speculation=common_pb2.Speculation(num_speculative_tokens=-1)),
        INVALID,
        "num_speculative_tokens",
    ),
    "request-id": (gateway_pb2.GenerateRequest(prompt="a", request_id="two words"), INVALID, "request_id"),
}


@pytest.mark.parametrize("case", BAD_GENERATES)
async def test_gateway_names_the_field(gateway: grpc.aio.Channel, case: str) -> None:
    request, code, fragment = BAD_GENERATES[case]
    stub: Any = gateway_pb2_grpc.GatewayStub(gateway)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(request).read()
    assert caught.value.code() is code
    assert fragment in (caught.value.details() or "")


async def test_gateway_refuses_garbage_and_lives_on(gateway: grpc.aio.Channel) -> None:
    ended = await call_unary(gateway, "/outrider.v1.Gateway/Generate", GARBAGE)
    # gRPC itself parses the one message of such a call, and chooses the status.
    assert ended.code in (INVALID, grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
    assert "parsing" in ended.details
    stub: Any = gateway_pb2_grpc.GatewayStub(gateway)
    request = gateway_pb2.GenerateRequest(prompt="import os", sampling_params=params(max_tokens=3, ignore_eos=True))
    token_ids = [token_id async for reply in stub.Generate(request) for token_id in reply.token_ids]
    assert len(token_ids) == 3


async def test_bad_sessions_leave_nothing_behind(stack: RunningStack) -> None:
    stack.wait_idle()
    info = stack.verifier_info()
    assert info.num_free_blocks == info.num_blocks
