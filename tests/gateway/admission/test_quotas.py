"""Quotas: the bucket's arithmetic by a clock of the test's own, the refusals at both servers over real sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_script import NoLog, Script, ScriptedService, until
from gateway_servers import ALICE, BOB, GatewayServers, key_file, open_servers

from outrider.gateway.admission.quotas import Account, Quotas, TokenBucket, metered
from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.start import EPOCHS_PER_TERM
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate, ValidRequest
from outrider.shared import rpc
from outrider.shared.api_keys import ApiKey, key_line
from outrider.shared.errors import GatewayFull, QuotaExceeded
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.v1 import common_pb2 as common
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc

HELLO: dict[str, Any] = {"prompt": "Hello", "max_tokens": 60}


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


# ---- arithmetic -------------------------------------------------------------------------------------------------


def test_a_bucket_holds_a_minute_and_refills_all_the_time() -> None:
    clock = Clock()
    bucket = TokenBucket(600, clock)  # ten per second
    bucket.take(599)
    assert bucket.wait_s() == 0.0
    bucket.take(1)
    assert bucket.wait_s() == pytest.approx(0.1)
    clock.now += 0.1
    assert bucket.wait_s() == pytest.approx(0.0, abs=1e-9)
    clock.now += 3600  # no more than a minute's tokens, however long nobody asks
    bucket.take(601)
    assert bucket.wait_s() == pytest.approx(0.2)


def test_an_overdrawn_bucket_waits_for_what_it_owes() -> None:
    clock = Clock()
    bucket = TokenBucket(600, clock)
    bucket.take(600 + 1199)
    assert bucket.wait_s() == pytest.approx(120.0)
    clock.now += 119.9
    assert bucket.wait_s() == pytest.approx(0.1)


def test_places_are_given_back_whatever_happens() -> None:
    quotas = Quotas(2)
    key = ApiKey("a", b"", max_concurrent=1)
    with quotas.admit(key), quotas.admit(None):
        with pytest.raises(QuotaExceeded, match="1 running requests") as raised, quotas.admit(key):
            pass
        assert raised.value.retry_after_s == 1.0
        with pytest.raises(GatewayFull), quotas.admit(ApiKey("b", b"")):
            pass
    with pytest.raises(KeyError), quotas.admit(key):
        raise KeyError
    with quotas.admit(key), quotas.admit(None):
        pass
    assert quotas.num_running == 0


def test_a_caller_leaves_as_many_places_as_it_has() -> None:
    """One caller gets half of the places, two a third each, and then somebody new is still let in."""
    quotas = Quotas(12)

    def held_by(caller: ApiKey | None, peer: str = "") -> int:
        for count in range(13):
            try:
                held.enter_context(quotas.admit(caller, peer))
            except QuotaExceeded:
                return count
        raise AssertionError

    with ExitStack() as held:
        assert held_by(ApiKey("a", b"")) == 6
        assert held_by(None, "10.0.0.1") == 3
        assert held_by(None, "10.0.0.2") == 2
        held.enter_context(quotas.admit(ApiKey("b", b"")))
        with pytest.raises(GatewayFull), quotas.admit(ApiKey("c", b"")):
            pass
    assert quotas.num_running == 0


def test_two_keys_of_one_owner_share_a_limit() -> None:
    quotas = Quotas(10)
    first, second = (ApiKey("a", digest, max_concurrent=1) for digest in (b"1", b"2"))
    with quotas.admit(first), pytest.raises(QuotaExceeded), quotas.admit(second):
        pass


def test_a_bucket_outlives_reading_the_file_again_and_follows_a_new_limit() -> None:
    clock = Clock()
    quotas = Quotas(10, clock)
    with quotas.admit(ApiKey("a", b"", tokens_per_minute=60)) as account:
        assert account is not None
        account.charge(60)
    same = ApiKey("a", b"", tokens_per_minute=60)
    with pytest.raises(QuotaExceeded, match="60 tokens per minute") as raised, quotas.admit(same):
        pass
    assert raised.value.retry_after_s == pytest.approx(1.0)
    with quotas.admit(ApiKey("a", b"", tokens_per_minute=600)):
        pass
    with quotas.admit(ApiKey("a", b"")) as account:
        assert account is not None
        account.charge(10**9)


# ---- at the servers -----------------------------------------------------------------------------------------------


@asynccontextmanager
async def limited(
    service: ScriptedService, folder: Path, **settings: Any
) -> AsyncIterator[tuple[GatewayServers, Any, Any]]:
    """The servers, an HTTP client and a gRPC stub; alice may run 2 requests, bob use 60 tokens a minute."""
    lines = (key_line("alice", ALICE, max_concurrent=2), key_line("bob", BOB, tokens_per_minute=60))
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(folder, *lines), **settings)
    async with (
        open_servers(service, config) as servers,
        httpx.AsyncClient(base_url=servers.url, timeout=60) as http,
        rpc.open_channel(servers.grpc_address) as channel,
    ):
        yield servers, http, pb_grpc.GatewayStub(channel)


def start_grpc(stub: Any, key: str) -> Any:
    request = pb.GenerateRequest(prompt="Hello", sampling_params=common.SamplingParams(max_tokens=60))
    return stub.Generate(request, metadata=tuple(bearer(key).items()))


async def retry_after_ms(call: Any) -> int:
    return int(dict(await call.trailing_metadata())["retry-after-ms"])


async def test_a_keys_concurrent_requests_are_counted_over_both_servers(
    service: ScriptedService, tmp_path: Path
) -> None:
    service.script = Script(endless=True)
    async with limited(service, tmp_path) as (servers, http, stub):
        whole = asyncio.create_task(http.post("/v1/completions", json=HELLO, headers=bearer(ALICE)))
        call = start_grpc(stub, ALICE)
        await until(lambda: service.num_open == 2)
        refused = await http.post("/v1/completions", json=HELLO, headers=bearer(ALICE))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.json()["error"]["type"] == "rate_limit_error"
        again = start_grpc(stub, ALICE)
        assert await again.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await retry_after_ms(again) == 1000
        assert service.num_opened == 2
        # Others are not her business, and a place that was given back is free at once.
        service.script = Script()
        assert (await http.post("/v1/completions", json=HELLO, headers=bearer(BOB))).status_code == 200
        call.cancel()
        await until(lambda: servers.admission.quotas.num_running == 1)
        assert (await http.post("/v1/completions", json=HELLO, headers=bearer(ALICE))).status_code == 200
        whole.cancel()
        await until(lambda: servers.admission.quotas.num_running == 0)


async def test_tokens_per_minute(service: ScriptedService, tmp_path: Path) -> None:
    """Three tokens of prompt and 38 of output are in every request; 60 a minute are one per second."""
    async with limited(service, tmp_path) as (_, http, stub):
        started = time.monotonic()
        first = await http.post("/v1/completions", json=HELLO, headers=bearer(BOB))
        assert first.json()["usage"]["total_tokens"] == 41
        assert [reply async for reply in start_grpc(stub, BOB)]  # 19 were left, so it may run; now it owes 22
        refused = await http.post("/v1/completions", json={**HELLO, "stream": True}, headers=bearer(BOB))
        assert refused.status_code == 429
        assert 22 - (time.monotonic() - started) <= int(refused.headers["retry-after"]) <= 23
        assert "60 tokens per minute" in refused.json()["error"]["message"]
        call = start_grpc(stub, BOB)
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert 22_000 - 1000 * (time.monotonic() - started) <= await retry_after_ms(call) <= 23_000
        assert service.num_opened == 2
        assert (await http.get("/v1/models", headers=bearer(BOB))).status_code == 200


async def test_every_choice_and_every_prompt_is_charged(service: ScriptedService, tmp_path: Path) -> None:
    async with limited(service, tmp_path) as (servers, http, _):
        body = {"prompt": ["Hello", "Hello"], "max_tokens": 10, "n": 2}
        started = time.monotonic()
        usage = (await http.post("/v1/completions", json=body, headers=bearer(BOB))).json()["usage"]
        assert usage["total_tokens"] == 2 * 3 + 4 * 10
        with servers.admission.quotas.admit(ApiKey("bob", b"", tokens_per_minute=60)) as account:
            assert account is not None
            assert account.bucket is not None
            account.charge(60 + 600 - usage["total_tokens"])
            # Until one token is there again, at one per second; what had run until now, the key has used.
            assert 600 - (time.monotonic() - started) <= account.bucket.wait_s() <= 601


class _AfterALostConnection:
    """Goes on as generation.py does: what the log has is replayed, the rest is new."""

    def __init__(self, service: ScriptedService, num_logged: int) -> None:
        self._service = service
        self._num_logged = num_logged

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        async for update in self._service.generate(request):
            yield replace(update, replayed=update.base_len < self._num_logged)


@pytest.mark.parametrize("num_logged", [0, 30, 38])
async def test_what_is_resumed_is_charged_once(service: ScriptedService, num_logged: int) -> None:
    """Of 38 tokens those that the first connection has logged, and the prompt of three, are on the key's bill."""
    start = ChoiceStart(0, SpeculationMode.EXACT, 0, NoLog())
    request = ValidRequest("gen-1", (1, 2, 3), SamplingParams(max_tokens=60), starts=(start,))
    logged = (LogEntry(0, tuple(range(num_logged)), finish_reason=0),) if num_logged else ()
    resumed = replace(request, starts=(replace(start, epoch=EPOCHS_PER_TERM, logged=logged),))
    account = Account("bob", Clock())
    account.set_limit(60)
    assert account.bucket is not None
    account.charge(59)  # one is left: whatever is charged from here on is owed
    again: Any = _AfterALostConnection(service, num_logged)
    assert [update async for update in metered(again, account).generate(resumed)]
    assert account.bucket.wait_s() == pytest.approx(38 - num_logged, abs=0.01)
    assert [update async for update in metered(service, account).generate(request)]
    assert account.bucket.wait_s() == pytest.approx(38 - num_logged + 3 + 38, abs=0.01)


async def test_the_gateways_bound_is_checked_before_the_body(service: ScriptedService, tmp_path: Path) -> None:
    service.script = Script(endless=True)
    async with limited(service, tmp_path, max_concurrent_requests=1) as (servers, http, stub):
        call = start_grpc(stub, ALICE)
        await until(lambda: service.num_open == 1)
        reader, writer = await asyncio.open_connection("127.0.0.1", servers.http_port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BOB}\r\ncontent-length: 99\r\n\r\n"
        writer.write(head.encode())
        async with asyncio.timeout(30):
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        writer.close()
        assert answer.startswith("http/1.1 503 ")
        assert "\r\nretry-after: 1\r\n" in answer
        refused = start_grpc(stub, BOB)
        assert await refused.code() is grpc.StatusCode.UNAVAILABLE
        assert await retry_after_ms(refused) == 1000
        # Whoever watches the gateway is still answered.
        for path in ("/health", "/ready", "/metrics"):
            assert (await http.get(path)).status_code == 200
        assert (await http.post("/ping")).status_code == 200
        call.cancel()
        await until(lambda: servers.admission.quotas.num_running == 0)


async def test_a_wrong_body_gives_its_place_back(service: ScriptedService, tmp_path: Path) -> None:
    async with limited(service, tmp_path, max_concurrent_requests=1) as (servers, http, stub):
        for body in (b"{", b'{"prompt": ""}'):
            answer = await http.post(
                "/v1/completions", content=body, headers={**bearer(ALICE), "content-type": "application/json"}
            )
            assert answer.status_code == 400
        metadata = tuple(bearer(ALICE).items())
        call = stub.Generate(pb.GenerateRequest(prompt=""), metadata=metadata)
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        await until(lambda: servers.admission.quotas.num_running == 0)


async def test_a_grpc_call_without_its_message_takes_no_place_and_ends(
    service: ScriptedService, tmp_path: Path
) -> None:
    async with (
        limited(service, tmp_path, body_timeout_s=2, max_concurrent_requests=2) as (servers, _, stub),
        rpc.open_channel(servers.grpc_address) as channel,
    ):
        method: Any = channel.stream_stream("/outrider.v1.Gateway/Generate")
        calls = [method(metadata=tuple(bearer(ALICE).items())) for _ in range(2)]
        assert [reply async for reply in start_grpc(stub, BOB)]
        for call in calls:
            assert await call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            assert "did not arrive within 2 s" in (await call.details() or "")
        assert servers.admission.quotas.num_running == 0


async def test_half_sent_bodies_take_no_places(service: ScriptedService, tmp_path: Path) -> None:
    """Nor does a body without end of which the head says no length."""
    async with limited(service, tmp_path, max_concurrent_requests=1) as (servers, http, _):
        for length in ("content-length: 99", "transfer-encoding: chunked"):
            _, writer = await asyncio.open_connection("127.0.0.1", servers.http_port)
            head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {ALICE}\r\n{length}\r\n"
            writer.write(f"{head}content-type: application/json\r\n\r\n5\r\n".encode())
            await until(lambda: servers.num_connections() > 0)
            answered = await http.post("/v1/completions", json=HELLO, headers=bearer(BOB))
            assert answered.status_code == 200
            writer.close()


async def test_places_that_are_taken_while_a_body_comes_refuse_it(service: ScriptedService, tmp_path: Path) -> None:
    service.script = Script(endless=True)
    async with limited(service, tmp_path, max_concurrent_requests=1) as (servers, _, stub):
        reader, writer = await asyncio.open_connection("127.0.0.1", servers.http_port)
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {BOB}\r\ncontent-length: 15\r\n"
        writer.write(f"{head}content-type: application/json\r\n\r\n".encode())
        await until(lambda: servers.num_connections() == 1)
        call = start_grpc(stub, ALICE)
        await until(lambda: service.num_open == 1)
        writer.write(b'{"prompt": "x"}')
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 503 ")
        writer.close()
        call.cancel()
        await until(lambda: servers.admission.quotas.num_running == 0)
