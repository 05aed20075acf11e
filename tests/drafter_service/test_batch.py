"""The batch call over real gRPC: many sessions in a stream, and what ends one of them, the stream, or nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from outrider.drafter_service import batch
from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafter_service.server import DrafterServicer
from outrider.drafter_service.tenants import Tenants
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.suffix import SuffixMethod, SuffixSettings
from outrider.drafting.session import DraftSession
from outrider.shared import rpc, wire
from outrider.shared.api_keys import KeyRing, key_line
from outrider.shared.messages import DrafterInfo, DraftMethodInfo, DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc

PROMPT = (5, 6, 7, 5, 6)
BOMB = 66
LONG_S = 30.0


class Ngrams(NgramMethod):
    """N-grams over 100 ids; a token that blows up, and a gate that all proposals wait at."""

    def __init__(self, vocab_size: int = 100) -> None:
        super().__init__(prompt_lookup_min=1, prompt_lookup_max=3)
        self.info = DraftMethodInfo(name="ngram", model="small", vocab_size=vocab_size)
        self.gate = threading.Event()
        self.gate.set()

    def advance(self, session: DraftSession) -> bool:
        if BOMB in session.token_ids:
            raise ValueError("boom")
        return super().advance(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        self.gate.wait(LONG_S)
        return super().propose(sessions)


def spec(method: str = "ngram", prompt: Sequence[int] = PROMPT, **params: Any) -> pb.OpenDrafterSession:
    given = SessionSpec("s", 1, tuple(prompt), (), SamplingParams(**params), SpeculationMode.EXACT, 0, method=method)
    return wire.open_drafter(given).open


def opening(number: int, message: pb.OpenDrafterSession | None = None) -> pb.DraftBatchItem:
    return pb.DraftBatchItem(session=number, open=message or spec())


def step(number: int, base_len: int = 0, tokens: Sequence[int] = (), count: int = 2) -> pb.DraftBatchItem:
    given = pb.DraftStep(epoch=1, base_len=base_len, committed_token_ids=tokens, num_draft_tokens=count)
    return pb.DraftBatchItem(session=number, step=given)


def engine(model: str = "big", digest: str = "", vocab_size: int = 100, method: str = "ngram") -> pb.DraftEngine:
    return pb.DraftEngine(model=model, tokenizer_digest=digest, vocab_size=vocab_size, method=method)


@dataclass
class Stream:
    call: Any

    async def send(self, *items: pb.DraftBatchItem, hello: pb.DraftEngine | None = None) -> None:
        await self.call.write(pb.DraftBatchRequest(engine=hello, items=items))

    async def read(self) -> dict[int, Any]:
        """Session -> its draft, or the text of its error."""
        reply = await asyncio.wait_for(self.call.read(), LONG_S)
        if reply is grpc.aio.EOF:
            raise grpc.aio.AioRpcError(await self.call.code(), (), (), details=await self.call.details())
        return {answer.session: answer.error or tuple(answer.proposal.proposal.token_ids) for answer in reply.answers}


@dataclass
class Served:
    drafter: DrafterEngine
    channel: grpc.aio.Channel
    keys: dict[str, str] = field(default_factory=dict)

    def stream(self, key: str = "") -> Stream:
        metadata = (("authorization", f"Bearer {key}"),) if key else ()
        return Stream(drafter_pb2_grpc.DrafterStub(self.channel).Batch(metadata=metadata))

    async def connected(self, hello: pb.DraftEngine | None = None, key: str = "") -> Stream:
        stream = self.stream(key)
        await stream.send(hello=hello or engine())
        assert await stream.read() == {}
        return stream

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_S):
            while not condition():  # noqa: ASYNC110 the engine's thread has no event for this
                await asyncio.sleep(0.005)


@asynccontextmanager
async def serving(*methods: DraftMethod, digest: str = "", tenants: Tenants | None = None) -> AsyncIterator[Served]:
    named = {method.info.name: method for method in methods or (Ngrams(),)}
    drafter = DrafterEngine(named, max_num_seqs=8, metrics=DrafterMetrics(CollectorRegistry()))
    info = DrafterInfo("test", tuple(method.info for method in named.values()), 1, 0, 8, digest)
    servicer = DrafterServicer(drafter, lambda: info, tenants=tenants)
    server = await rpc.start_server(
        "127.0.0.1", 0, lambda grpc_server: drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, grpc_server), ()
    )
    drafter.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Served(drafter, channel)
    finally:
        await server.drain(0)
        drafter.stop()


async def test_the_sessions_of_a_batch_are_answered_in_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    method, submitted, submit = Ngrams(), list[int](), DrafterEngine.submit

    def counted(drafter: DrafterEngine, handle: int, given: DraftStep) -> None:
        submit(drafter, handle, given)
        submitted.append(handle)

    monkeypatch.setattr(DrafterEngine, "submit", counted)
    async with serving(method) as served:
        stream = await served.connected()
        await stream.send(*(item for number in range(8) for item in (opening(number), step(number))))
        first: dict[int, Any] = {}
        while len(first) < 8:  # their prompts are read one after the other
            first |= await stream.read()
        assert first == dict.fromkeys(range(8), (7, 5))
        method.gate.clear()  # with a batch of one under way the others gather
        await stream.send(step(0, 0, (7,)))
        await stream.send(*(step(number, 0, (7,)) for number in range(1, 8)))
        await served.until(lambda: len(submitted) == 16)
        method.gate.set()
        found = await stream.read()
        if len(found) < 8:
            found |= await stream.read()
        assert found == dict.fromkeys(range(8), (5, 6)), "in one message for each of two batches at most"


async def test_a_session_that_fails_ends_alone() -> None:
    async with serving() as served:
        stream = await served.connected()
        await stream.send(
            opening(1), opening(2, spec(prompt=(BOMB,))), opening(3, spec(prompt=(100,))), opening(4), step(9)
        )
        answers: dict[int, Any] = {}
        while len(answers) < 3:
            answers |= await stream.read()
        assert "internal error" in answers[2]
        assert "outside the vocabulary" in answers[3]
        assert "not open" in answers[9]
        await stream.send(step(1), step(4, 5))
        answers = {}
        while len(answers) < 2:
            answers |= await stream.read()
        assert answers[1] == (7, 5)
        assert "only 0 tokens were reported" in answers[4]
        await served.until(lambda: served.drafter.num_sessions == 1)
        await stream.send(opening(4), step(4))
        assert await stream.read() == {4: (7, 5)}, "opened anew"


async def test_a_number_that_is_opened_again_replaces_its_session_and_the_stream_s_end_frees_all() -> None:
    async with serving() as served:
        stream = await served.connected()
        await stream.send(opening(2))
        for _ in range(20):
            await stream.send(opening(1), step(1))
            assert await stream.read() == {1: (7, 5)}
        assert served.drafter.num_sessions == 2
        await stream.send(pb.DraftBatchItem(session=2, close=pb.CloseDrafterSession()))
        await served.until(lambda: served.drafter.num_sessions == 1)
        stream.call.cancel()
        await served.until(lambda: served.drafter.num_sessions == 0)


async def test_a_full_drafter_refuses_a_session_and_no_other() -> None:
    async with serving() as served:
        stream = await served.connected()
        await stream.send(*(opening(number) for number in range(9)), step(0))
        answers: dict[int, Any] = {}
        while len(answers) < 2:
            answers |= await stream.read()
        assert answers[0] == (7, 5)
        assert "8 sessions are open" in answers[8]


@pytest.mark.parametrize(
    ("first", "said"),
    [
        (pb.DraftBatchRequest(items=[opening(1)]), "must have `engine`"),
        (pb.DraftBatchRequest(engine=engine(method="medusa")), "'medusa' is not served here, only ngram"),
        (pb.DraftBatchRequest(engine=engine(vocab_size=99)), "'big' (99 ids"),
        (pb.DraftBatchRequest(engine=engine(digest="b" * 64)), "tokenizer bbbbbbbbbbbb"),
        (pb.DraftBatchRequest(engine=engine(), items=[step(1)] * 4097), "4097 items"),
    ],
)
async def test_streams_that_are_refused(first: pb.DraftBatchRequest, said: str) -> None:
    async with serving(digest="a" * 64) as served:
        stream = served.stream()
        await stream.call.write(first)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read() or await stream.read()
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert said in str(refused.value.details())
        await served.connected(engine(digest="a" * 64, vocab_size=128))  # a padded vocabulary of the same tokenizer


async def test_engines_of_different_tokens_are_refused_by_name_while_the_other_is_here() -> None:
    """With methods of no vocabulary the first engine's is the fleet's."""
    async with serving(Ngrams(vocab_size=0)) as served:
        first = await served.connected(engine("llama", "a" * 64, 100))
        await served.connected(engine("llama-70b", "a" * 64, 128))
        stream = served.stream()
        await stream.send(hello=engine("qwen", "b" * 64, 100))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stream.read()
        assert "'qwen'" in str(refused.value.details())
        assert "'llama'" in str(refused.value.details())
        first.call.cancel()


async def test_grammars_and_other_methods_are_refused_by_name() -> None:
    async with serving() as served:
        stream = await served.connected()
        guided = spec(grammar=Grammar(GrammarKind.JSON_OBJECT, ""))
        await stream.send(opening(1, guided), opening(2, spec("suffix")), opening(3), step(3))
        answers: dict[int, Any] = {}
        while len(answers) < 3:
            answers |= await stream.read()
        assert "no grammar" in answers[1]
        assert "another method" in answers[2]
        assert answers[3] == (7, 5)


async def test_answers_that_nobody_reads_end_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_MAX_UNREAD", 3)
    stream = batch.BatchStream(None, None, Tenants(), None, [])  # type: ignore[arg-type] only its answers are used
    told: list[Any] = []
    stream._on_reply = told.append
    for _ in range(4):
        stream._answer(batch._Session(1), ValueError("x"))
        stream._flush()
    assert isinstance(told[-1], Exception)
    assert "unread" in str(told[-1])


# ---- tenants ----


@pytest.fixture
def keyed(tmp_path: Any) -> Tenants:
    file = tmp_path / "keys"
    file.write_text(f"{key_line('ann', 'or-ann', 2)}\n{key_line('bob', 'or-bob')}\n")
    return Tenants(KeyRing(str(file)), max_sessions=3)


async def test_every_call_needs_a_key(keyed: Tenants) -> None:
    async with serving(tenants=keyed) as served:
        stub: Any = drafter_pb2_grpc.DrafterStub(served.channel)
        for key in ("", "or-eve"):
            metadata = (("authorization", f"Bearer {key}"),) if key else ()
            calls = [
                stub.Batch(iter([pb.DraftBatchRequest()]), metadata=metadata).read(),
                stub.Session(iter([pb.DrafterRequest()]), metadata=metadata).read(),
                stub.GetInfo(pb.GetDrafterInfoRequest(), metadata=metadata),
            ]
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await call
                assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        await stub.GetInfo(pb.GetDrafterInfoRequest(), metadata=(("authorization", "Bearer or-ann"),))


async def test_the_quota_is_over_all_streams_of_a_key_and_is_given_back(keyed: Tenants) -> None:
    async with serving(tenants=keyed) as served:
        one, other = await served.connected(key="or-ann"), await served.connected(key="or-ann")
        bob = await served.connected(key="or-bob")
        await one.send(opening(1), opening(2))
        await served.until(lambda: served.drafter.num_sessions == 2)
        await other.send(opening(1))
        assert "ann has 2 sessions open" in (await other.read())[1]
        await bob.send(opening(1), opening(2), opening(3), opening(4))
        assert "bob has 3 sessions open" in (await bob.read())[4]
        metadata = (("authorization", "Bearer or-ann"),)
        session: Any = drafter_pb2_grpc.DrafterStub(served.channel).Session(metadata=metadata)
        await session.write(pb.DrafterRequest(open=spec()))
        with pytest.raises(grpc.aio.AioRpcError, match="its quota"):
            await session.read()
        one.call.cancel()
        await served.until(lambda: served.drafter.num_sessions == 3)
        await other.send(opening(1), step(1))
        assert await other.read() == {1: (7, 5)}


async def test_texts_of_one_tenant_are_no_drafts_of_another(keyed: Tenants) -> None:
    suffix = SuffixMethod(SuffixSettings(24, 100, 10_000, 1.0, 0.1))
    text = tuple(range(10, 30))
    async with serving(suffix, tenants=keyed) as served:
        for key in ("or-ann", "or-bob", "or-ann"):
            stream = await served.connected(engine(method="suffix"), key)
            await stream.send(opening(1, spec("suffix", (1, 2))), step(1, 0, text[:8]))
            [draft] = (await stream.read()).values()
            is_known = key == "or-ann" and len(suffix.past) == 2
            assert draft == (text[8:10] if is_known else ())
            await stream.send(step(1, 8, text[8:]), pb.DraftBatchItem(session=1, close=pb.CloseDrafterSession()))
            num_texts = len(suffix.past)
            await served.until(lambda: served.drafter.num_sessions == 0 and len(suffix.past) > num_texts)  # noqa: B023
