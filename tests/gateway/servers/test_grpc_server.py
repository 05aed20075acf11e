"""The gRPC server over a real channel: the same requests, the same refusals as status codes, cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_script import Script, ScriptedService

from outrider.gateway.request.event_cursor import Seen
from outrider.gateway.servers.grpc_server import SERVICE_NAMES, add_gateway_servicer
from outrider.shared import rpc
from outrider.shared.checkpoint.sampling_defaults import SamplingDefaults
from outrider.shared.errors import Overloaded, VerifierLost
from outrider.v1 import common_pb2 as common
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc

TEXT = "Paris is the capital 漢字 👩‍👩‍👧 of France."


@pytest.fixture
async def stub(service: ScriptedService) -> AsyncIterator[Any]:
    server = await rpc.start_server("127.0.0.1", 0, lambda server: add_gateway_servicer(server, service), SERVICE_NAMES)
    async with rpc.open_channel(f"127.0.0.1:{server.port}") as channel:
        yield pb_grpc.GatewayStub(channel)
    await server.drain(0)


def ids(*token_ids: int) -> common.TokenSequence:
    return common.TokenSequence(token_ids=token_ids)


async def replies_of(stub: Any, **fields: Any) -> list[pb.GenerateReply]:
    return [reply async for reply in stub.Generate(pb.GenerateRequest(**fields))]


def params(**fields: Any) -> common.SamplingParams:
    return common.SamplingParams(**{"max_tokens": 60, **fields})


async def test_sampling_defaults_are_not_applied_but_their_limit_is(stub: Any, service: ScriptedService) -> None:
    """An absent temperature is 0 on this wire, so nothing can be told to be left out."""
    defaults = SamplingDefaults(temperature=0.6, top_k=20, max_tokens=9, max_tokens_limit=9)
    service.model = replace(service.model, sampling_defaults=defaults)
    await replies_of(stub, prompt="Hello", sampling_params=params())
    asked = service.requests[0].sampling_params
    assert (asked.temperature, asked.top_k, asked.max_tokens) == (0.0, 0, 9)


async def test_a_generation(stub: Any, service: ScriptedService) -> None:
    sampling = params(num_logprobs=2, seed=7, temperature=0.5)
    speculation = common.Speculation(method="ngram", num_speculative_tokens=4, mode=common.SPECULATION_MODE_REJECTION)
    replies = await replies_of(
        stub,
        prompt="Hello",
        sampling_params=sampling,
        request_id="mine",
        speculation=speculation,
        cache_salt="s",
        prediction=" there",
    )
    assert "".join(reply.text for reply in replies) == TEXT
    token_ids = [token_id for reply in replies for token_id in reply.token_ids]
    assert service.tokenizer.decode(token_ids) == TEXT
    assert [reply.base_len for reply in replies] == list(range(0, len(token_ids), 3))
    assert {reply.request_id for reply in replies} == {"mine"}
    assert replies[0].origins[2] == common.TOKEN_ORIGIN_CORRECTED
    assert list(replies[0].logprobs[0].top_token_ids) == [10, 11]
    last = replies[-1]
    assert [reply.finish_reason for reply in replies[:-1]] == [0] * (len(replies) - 1)
    assert last.finish_reason == common.FINISH_REASON_STOP
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (3, 38, 2)
    assert last.speculation.mean_acceptance_length == 2.5
    [request] = service.requests
    assert (request.sampling_params.seed, request.sampling_params.temperature) == (7, 0.5)
    assert request.speculation.mode == "rejection"
    assert (request.speculation.method, request.speculation.num_speculative_tokens) == ("ngram", 4)
    assert request.cache_salt == "s"
    assert request.predicted_token_ids == tuple(service.tokenizer.encode(" there", add_special_tokens=False))


async def test_the_three_inputs(stub: Any, service: ScriptedService) -> None:
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    for given in ({"prompt": "Hello"}, {"prompt_token_ids": ids(44, 339, 308)}, {"messages": chat}):
        await replies_of(stub, **given)
    prompts = [service.tokenizer.decode(request.prompt_token_ids, False) for request in service.requests]
    assert prompts == ["Hello", "Hello", "<|user|>\nhi<|end|>\n<|assistant|>\n"]
    assert service.requests[0].sampling_params.max_tokens == 16
    assert len({request.request_id for request in service.requests}) == 3


async def test_stop_strings(stub: Any) -> None:
    replies = await replies_of(stub, prompt="x", sampling_params=params(), stop=["capital"])
    assert "".join(reply.text for reply in replies) == "Paris is the "
    assert replies[-1].stop_reason == "capital"


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({}, "INVALID_ARGUMENT", "one of prompt, prompt_token_ids and messages is required"),
        ({"prompt": ""}, "INVALID_ARGUMENT", "prompt is empty"),
        ({"prompt_token_ids": ids()}, "INVALID_ARGUMENT", "prompt_token_ids is empty"),
        ({"prompt_token_ids": ids(4096)}, "INVALID_ARGUMENT", "out of vocabulary"),
        ({"prompt_token_ids": ids(*[5] * 512)}, "INVALID_ARGUMENT", "exceeds the model's context"),
        ({"messages": pb.ChatMessages()}, "INVALID_ARGUMENT", "messages must not be empty"),
        ({"prompt": "a", "model": "gpt"}, "NOT_FOUND", "'gpt' is not served"),
        ({"prompt": "a", "stop": [""]}, "INVALID_ARGUMENT", "stop must not contain an empty string"),
        ({"prompt": "a", "request_id": "a b"}, "INVALID_ARGUMENT", "visible ASCII"),
        ({"prompt": "a", "sampling_params": params(max_tokens=512)}, "INVALID_ARGUMENT", "max_tokens is 512"),
        ({"prompt": "a", "sampling_params": params(max_tokens=-1)}, "INVALID_ARGUMENT", "max_tokens must be at least"),
        ({"prompt": "a", "sampling_params": params(temperature=float("nan"))}, "INVALID_ARGUMENT", "temperature must"),
        ({"prompt": "a", "sampling_params": params(top_p=2)}, "INVALID_ARGUMENT", "top_p must be"),
        ({"prompt": "a", "sampling_params": params(stop_token_ids=[9999])}, "INVALID_ARGUMENT", "token id 9999"),
        (
            {"prompt": "a", "speculation": common.Speculation(method="x")},
            "INVALID_ARGUMENT",
            "not one of auto, off, ngram",
        ),
        (
            {"prompt": "a", "speculation": common.Speculation(num_speculative_tokens=99)},
            "INVALID_ARGUMENT",
            "num_speculative_tokens must be between 1 and 32",
        ),
    ],
)
async def test_refusals(stub: Any, service: ScriptedService, fields: Any, code: str, message: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError, match=message) as raised:
        await replies_of(stub, **fields)
    assert raised.value.code() is grpc.StatusCode[code]
    assert service.num_opened == 0


@pytest.mark.parametrize(
    ("script", "code", "num_replies"),
    [
        (Script(error=Overloaded("full")), "RESOURCE_EXHAUSTED", 0),
        (Script(error=VerifierLost("gone"), error_at=2), "UNAVAILABLE", 2),
        (Script(error=KeyError("secret"), error_at=1), "INTERNAL", 1),
        (Script(ends_early=True), "INTERNAL", 6),
    ],
)
async def test_errors_of_the_generation(
    stub: Any, service: ScriptedService, script: Script, code: str, num_replies: int
) -> None:
    # gRPC tells nothing of what nobody has read when a call is aborted.
    heard = asyncio.Event()
    service.script = replace(script, heard=heard)
    replies: list[pb.GenerateReply] = []

    async def collect() -> None:
        call = stub.Generate(pb.GenerateRequest(prompt="x"))
        while True:
            if len(replies) == num_replies:
                heard.set()
            if (reply := await call.read()) is grpc.aio.EOF:
                return
            replies.append(reply)

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await collect()
    assert raised.value.code() is grpc.StatusCode[code]
    assert "secret" not in str(raised.value.details())
    assert len(replies) == num_replies
    assert service.num_open == 0


async def test_cancelling_frees_everything(stub: Any, service: ScriptedService) -> None:
    service.script = Script(endless=True)
    call = stub.Generate(pb.GenerateRequest(prompt="x"))
    assert (await call.read()).text == "Paris is"
    assert service.num_open == 1
    call.cancel()
    async with asyncio.timeout(30):
        while service.num_open:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("base_len", [0, 1, 3, 17, 37, 38])
async def test_resume_sends_what_follows(stub: Any, service: ScriptedService, base_len: int) -> None:
    """The replies from the first one on that reaches further, as they were; the whole usage; the end in any case."""
    sampling = params(num_logprobs=1)
    all_replies = await replies_of(stub, prompt="Hello", sampling_params=sampling, request_id="mine")
    resumed = [reply async for reply in stub.Resume(pb.ResumeRequest(request_id="mine", base_len=base_len))]
    assert resumed == [
        reply for reply in all_replies if reply.base_len + len(reply.token_ids) > base_len or reply.finish_reason
    ]
    assert resumed[-1].usage.completion_tokens == 38
    [wanted] = service.wanted
    assert (wanted.owner, wanted.seen, wanted.choice) == ("", {0: Seen(base_len, epoch=None)}, 0)
    assert service.num_open == 0


async def test_replies_and_resumptions_name_the_session(stub: Any, service: ScriptedService) -> None:
    """Of tokens without a seed, so that those that were drawn again after a loss are told from them."""
    service.script = Script(epoch=77)
    replies = await replies_of(stub, prompt="Hello", request_id="mine")
    assert {reply.epoch for reply in replies} == {77}
    async for _ in stub.Resume(pb.ResumeRequest(request_id="mine", base_len=17, epoch=77)):
        pass
    assert [wanted.seen for wanted in service.wanted] == [{0: Seen(17, epoch=77)}]


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"request_id": "nobody"}, "NOT_FOUND"), ({}, "NOT_FOUND"), ({"base_len": -1}, "INVALID_ARGUMENT")],
)
async def test_refused_resumes(stub: Any, fields: dict[str, Any], code: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await stub.Resume(pb.ResumeRequest(**fields)).read()
    assert raised.value.code() is grpc.StatusCode[code]


async def test_model(stub: Any) -> None:
    model = await stub.GetModel(pb.GetModelRequest())
    assert (model.model, model.max_model_len, list(model.draft_methods), model.version) == (
        "demo",
        512,
        ["ngram", "draft_model"],
        "1.2.3",
    )
