"""Both Python clients against gateways that stall, are full, vanish and come back, behind real gRPC sockets."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from scripted_gateway import NUM_TOKENS, Gateway, Log, nobodys_address, serving

from outrider.client import AsyncOutriderClient, Completion, OutriderClient, SamplingParams, StructuredOutputsParams
from outrider.client.api.params import generate_message
from outrider.shared.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from outrider.v1 import gateway_pb2 as pb

# Longer than a busy machine keeps a gateway that does not stall from its next words.
STALL_S = 3.0
# Either client: addresses and settings -> the completion and the texts of the updates. What comes, `log` calls heard.
Driver = Callable[..., Any]


async def by_blocking(
    addresses: str | Sequence[str], *, log: Log | None = None, **settings: Any
) -> tuple[Completion, list[str]]:
    log = log or Log()
    with OutriderClient(addresses, **settings) as client:
        updates = list(log.heard(client.stream("hello"), lambda update: len(update.tokens)))
    return updates[-1].completion, [update.text for update in updates]  # type: ignore[return-value]


async def by_asyncio(
    addresses: str | Sequence[str], *, log: Log | None = None, **settings: Any
) -> tuple[Completion, list[str]]:
    log, updates = log or Log(), []
    async with AsyncOutriderClient(addresses, **settings) as client:
        async for update in client.stream("hello"):
            log.hear(len(update.tokens))
            updates.append(update)
    return updates[-1].completion, [update.text for update in updates]  # type: ignore[return-value]


@pytest.fixture(params=[by_blocking, by_asyncio])
def run(request: pytest.FixtureRequest) -> Driver:
    driver: Driver = request.param
    return driver


@pytest.fixture
def log() -> Log:
    return Log()


class Stalls(Gateway):
    """Says two tokens and then nothing, for a while that no test waits for."""

    def replies(self, base_len: int, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
        yield next(super().replies(base_len, context))
        while context.is_active():
            time.sleep(0.02)


class Refuses(Gateway):
    """The first `num_times` calls, before anything is begun."""

    def __init__(self, log: Log, code: grpc.StatusCode, num_times: int, retry_after_s: float = 0.0) -> None:
        super().__init__(log)
        self._code, self._num_left, self._retry_after_s = code, num_times, retry_after_s

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
        self._refuse(context)
        return super().Generate(request, context)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
        self._refuse(context)
        return super().Resume(request, context)

    def _refuse(self, context: grpc.ServicerContext) -> None:
        if self._num_left:
            self._num_left -= 1
            self.calls.append("refused")
            if self._retry_after_s:
                context.set_trailing_metadata((("retry-after-ms", str(int(self._retry_after_s * 1000))),))
            context.abort(self._code, "param_name: not now")


def check_whole(completion: Completion, texts: list[str]) -> None:
    assert completion.token_ids == tuple(range(NUM_TOKENS))
    assert completion.text == "".join(texts) == "".join(map(str, range(NUM_TOKENS)))
    assert completion.finish_reason == "length"


async def test_a_lost_connection_goes_on_at_the_next_address(log: Log, run: Driver) -> None:
    dies, stays = Gateway(log, dies_after=4), Gateway(log)
    with serving(dies) as first, serving(stays) as second:
        completion, texts = await run([first, second], log=log)
    check_whole(completion, texts)
    assert completion.num_resumes == 1
    assert dies.calls == ["generate"]
    assert stays.calls == ["resume 4"]


async def test_a_stream_that_stalls_goes_on_at_the_next_address(log: Log, run: Driver) -> None:
    stalls, stays = Stalls(log), Gateway(log)
    with serving(stalls) as first, serving(stays) as second:
        began = time.monotonic()
        completion, texts = await run([first, second], stall_timeout_s=STALL_S)
        assert time.monotonic() - began >= STALL_S
    check_whole(completion, texts)
    assert completion.num_resumes == 1
    assert stays.calls == ["resume 2"]


def test_a_slow_reader_is_no_stall(log: Log) -> None:
    gateway = Gateway(log)
    with serving(gateway) as address, OutriderClient(address, stall_timeout_s=STALL_S) as client:
        for update in client.stream("hello"):
            if update.tokens[0].token_id == 2:
                time.sleep(STALL_S + 1.0)
    assert gateway.calls == ["generate"]


async def test_a_full_gateway_is_asked_again_when_it_says_so(log: Log, run: Driver) -> None:
    gateway = Refuses(log, grpc.StatusCode.RESOURCE_EXHAUSTED, 2, retry_after_s=0.3)
    with serving(gateway) as address:
        began = time.monotonic()
        completion, texts = await run(address, max_retries=2)
        assert time.monotonic() - began >= 0.6
    check_whole(completion, texts)
    assert gateway.calls == ["refused", "refused", "resume 0", "generate"]


async def test_a_gateway_that_stays_full(log: Log, run: Driver) -> None:
    gateway = Refuses(log, grpc.StatusCode.RESOURCE_EXHAUSTED, 9, retry_after_s=0.05)
    with serving(gateway) as address:
        with pytest.raises(Overloaded, match="not now") as refused:
            await run(address, max_retries=1)
        assert refused.value.retry_after_s == 0.05
        assert gateway.calls == ["refused"] * 2
        # A pause that the time does not suffice for is not begun.
        began = time.monotonic()
        gateway._retry_after_s = 60.0
        with pytest.raises(DeadlineExceeded, match="within 30 s"):
            await run(address, timeout_s=30.0)
        assert time.monotonic() - began < 20


async def test_the_deadline_holds_over_all_attempts(log: Log, run: Driver) -> None:
    stalls = Stalls(log)
    with serving(stalls) as address:
        began = time.monotonic()
        with pytest.raises(DeadlineExceeded, match=r"within 4 s \(\d+ tokens were received\)"):
            await run(address, timeout_s=4.0, stall_timeout_s=1.0)
        assert 3.9 < time.monotonic() - began < 34
    assert len(stalls.calls) > 1


async def test_a_closed_client_is_not_opened_again(log: Log) -> None:
    with serving(Gateway(log)) as address:
        with OutriderClient(address) as blocking:
            assert len(blocking.generate("hello").tokens) == NUM_TOKENS
        async with AsyncOutriderClient(address) as awaited:
            assert len((await awaited.generate("hello")).tokens) == NUM_TOKENS
        with pytest.raises(OutriderError, match="the client is closed"):
            blocking.generate("hello")
        with pytest.raises(OutriderError, match="the client is closed"):
            await awaited.generate("hello")


def test_a_batch_that_is_interrupted_cuts_what_runs(log: Log) -> None:
    """As Ctrl-C does: the error of the callback comes through, and nobody waits for the prompt that stalls."""

    def interrupt(num_done: int, num_prompts: int) -> None:
        raise KeyboardInterrupt

    class StallsOnce(Stalls):
        def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
            return (
                super().Generate(request, context)
                if request.prompt == "stall"
                else Gateway(log).Generate(request, context)
            )

    began = time.monotonic()
    with serving(StallsOnce(log)) as address, OutriderClient(address) as client, pytest.raises(KeyboardInterrupt):
        client.batch(["stall", "hello"], progress=interrupt)
    assert time.monotonic() - began < 20


async def test_nobody_is_asked_as_often_as_was_said(run: Driver) -> None:
    with pytest.raises(Unavailable, match="0 tokens were received"):
        await run(nobodys_address(), max_retries=1)


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, InvalidRequest),
        (grpc.StatusCode.UNAUTHENTICATED, Unauthenticated),
        (grpc.StatusCode.INTERNAL, InternalError),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, Overloaded),  # without a time to come back at: not tried again
        (grpc.StatusCode.UNIMPLEMENTED, OutriderError),
    ],
)
async def test_refusals_have_types(log: Log, run: Driver, code: grpc.StatusCode, kind: type[OutriderError]) -> None:
    gateway = Refuses(log, code, 1)
    with serving(gateway) as address, pytest.raises(OutriderError, match="not now") as refused:
        await run(address)
    assert type(refused.value) is kind
    assert refused.value.param == ("param_name" if kind is InvalidRequest else None)
    assert gateway.calls == ["refused"]


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], SamplingParams(), "prompt"),
        ("x", SamplingParams(temperature=-1), "temperature"),
        ("x", SamplingParams(structured_outputs=StructuredOutputsParams()), "structured_outputs"),
        (
            "x",
            SamplingParams(structured_outputs=StructuredOutputsParams(regex="a", choice=["b"])),
            "structured_outputs",
        ),
        ([{"role": "user"}], SamplingParams(), None),
        ([2**40], SamplingParams(), None),
        ("x", SamplingParams(max_tokens="5"), None),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_sent_is_refused_here(prompt: Any, params: SamplingParams, param: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate_message("id", prompt, params)
    assert refused.value.param == param
