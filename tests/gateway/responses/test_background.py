"""Responses in the background, over real HTTP and in a real Redis, whoever reads them, hangs up or dies.

The other gateway is a second service with the same log and the same Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import redis.asyncio as aioredis
from gateway_script import Script, ScriptedService
from gateway_servers import ALICE, BOB, GatewayServers, key_file, open_servers
from responses_client import CountedRedis, events_of

from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.gateway.responses.store import ResponseStore
from outrider.shared.errors import LogUnavailable, VerifierLost
from tests.redis_server import RedisServer

TEXT = "One two three four five six."


@dataclass
class GatedService(ScriptedService):
    """Its model pauses after the first update until `gate` is set."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        async with aclosing(super().generate(request)) as updates:
            async for update in updates:
                yield update
                await self.gate.wait()


@pytest.fixture
def gated(service: ScriptedService, store: ResponseStore) -> GatedService:
    return GatedService(service.tokenizer, Script(TEXT), model=service.model, response_store=store)


@asynccontextmanager
async def gateway(service: ScriptedService, **config: Any) -> AsyncIterator[tuple[GatewayServers, openai.AsyncOpenAI]]:
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0, model="demo", drain_s=1.0, **config)) as servers,
        openai.AsyncOpenAI(base_url=f"{servers.url}/v1", api_key=ALICE, max_retries=0) as client,
    ):
        yield servers, client


async def finished(client: openai.AsyncOpenAI, response_id: str) -> Any:
    async with asyncio.timeout(60):
        while True:
            response = await client.responses.retrieve(response_id)
            if response.status not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.01)


async def idle(service: ScriptedService) -> None:
    async with asyncio.timeout(60):
        while service.num_open:  # noqa: ASYNC110 - the service has a count, no event
            await asyncio.sleep(0.01)


async def until_opened(service: ScriptedService) -> None:
    async with asyncio.timeout(60):
        while not service.num_opened:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_it_answers_at_once_and_is_there_in_the_end(gated: GatedService) -> None:
    async with gateway(gated) as (_, client):
        begun = await client.responses.create(input="A?", background=True, metadata={"a": "b"})
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        running = await client.responses.retrieve(begun.id)
        assert (running.status, running.metadata) == ("in_progress", {"a": "b"})
        assert (await client.responses.input_items.list(begun.id)).data
        with pytest.raises(openai.BadRequestError, match="is still in progress"):
            await client.responses.create(input="B?", previous_response_id=begun.id)
        gated.gate.set()
        done = await finished(client, begun.id)
        assert (done.status, done.output_text, done.created_at) == ("completed", TEXT, begun.created_at)
        assert (await client.responses.create(input="B?", previous_response_id=begun.id)).output_text == TEXT


async def test_a_stream_goes_on_unread_and_from_any_event(gated: GatedService) -> None:
    async with gateway(gated) as (servers, client):
        body = {"input": "A?", "background": True, "stream": True}
        async with httpx.AsyncClient(base_url=servers.url) as http:
            async with http.stream("POST", "/v1/responses", json=body) as answer:
                response_id = answer.headers["x-request-id"]
                first = await anext(answer.aiter_text())
            assert "response.created" in first
            gated.gate.set()
            done = await finished(client, response_id)
            assert done.output_text == TEXT, "nobody has read it"
            whole = events_of(await http.get(f"/v1/responses/{response_id}?stream=true"))
        assert whole[-1]["response"] == {**whole[-1]["response"], "status": "completed", "id": response_id}
        assert [event["sequence_number"] for event in whole] == list(range(len(whole)))
        for after in range(len(whole)):
            stream = await client.responses.retrieve(response_id, stream=True, starting_after=after)
            rest = [event.to_dict() async for event in stream]
            assert [event["sequence_number"] for event in rest] == list(range(after + 1, len(whole)))


async def test_a_reader_that_comes_back_while_it_runs_reads_the_rest(gated: GatedService) -> None:
    async with gateway(gated) as (_, client):
        begun = await client.responses.create(input="A?", background=True)
        stream = await client.responses.retrieve(begun.id, stream=True)
        assert (await anext(aiter(stream))).type == "response.created"
        gated.gate.set()
        events = [event async for event in stream]
        assert events[-1].type == "response.completed"
        assert (await finished(client, begun.id)).output_text == TEXT


async def test_a_cancelled_one_stops_and_stays_cancelled(gated: GatedService) -> None:
    async with gateway(gated) as (servers, client):
        begun = await client.responses.create(input="A?", background=True)
        for _ in range(2):
            assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await idle(gated)
        assert (await client.responses.retrieve(begun.id)).status == "cancelled"
        async with httpx.AsyncClient(base_url=servers.url) as http:
            refused = await http.get(f"/v1/responses/{begun.id}?stream=true")
        assert refused.status_code == 409
        assert "is cancelled: its stream does not go on" in refused.json()["error"]["message"]
        gated.gate.set()
        done = await client.responses.create(input="A?")
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
            await client.responses.cancel(done.id)
        late = await client.responses.create(input="A?", background=True)
        await finished(client, late.id)
        assert (await client.responses.cancel(late.id)).status == "completed"


async def test_a_deleted_one_stops(gated: GatedService) -> None:
    async with gateway(gated) as (_, client):
        begun = await client.responses.create(input="A?", background=True)
        await client.responses.delete(begun.id)
        await idle(gated)
        for call in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(begun.id)


async def test_an_error_is_its_end_with_the_reason(gated: GatedService) -> None:
    gated.script = Script(TEXT, error=VerifierLost("the verifier was lost"), error_at=1)
    gated.gate.set()
    async with gateway(gated) as (_, client):
        begun = await client.responses.create(input="A?", background=True)
        done = await finished(client, begun.id)
        assert (done.status, done.error and done.error.message) == ("failed", "the verifier was lost")


async def test_another_gateway_goes_on_when_the_first_shows_no_sign_of_life(gated: GatedService) -> None:
    other = replace(gated, gate=asyncio.Event())
    other.gate.set()
    async with gateway(gated) as (_, client), gateway(other) as (_, elsewhere):
        begun = await client.responses.create(input="A?", background=True)
        assert (await elsewhere.responses.retrieve(begun.id)).status == "in_progress"
        assert other.wanted == [], "its gateway works on it"
    # The first gateway has ended, and let go of it.
    async with gateway(other) as (_, elsewhere):
        assert (await finished(elsewhere, begun.id)).output_text == TEXT
        assert len(other.wanted) == 1


async def test_one_command_renews_all_leases(
    gated: GatedService, redis: CountedRedis, redis_server: RedisServer
) -> None:
    """Each had two commands of its own every two seconds, up to 140 ms of the gateway's time for 512."""
    num_responses = 30
    async with gateway(gated) as (_, client), aioredis.Redis.from_url(redis_server.url) as other:
        for _ in range(num_responses):
            await client.responses.create(input="A?", background=True)
        async with asyncio.timeout(60):
            while gated.num_opened < num_responses:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            leases = await other.keys("outrider:lease:*")
            assert len(leases) == num_responses
            before = redis.num_commands
            await other.delete(*leases)
            while await other.exists(*leases) < num_responses:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert redis.num_commands - before <= 2, "two: a beat may have been under way"


async def test_a_redis_that_was_away_for_too_long_is_not_its_end(gated: GatedService, store: ResponseStore) -> None:
    """The gateway gives up, its lease expires, and whoever is asked for the response continues it."""
    gated.script = Script(TEXT, error=LogUnavailable("Redis has not answered for 15 s"), error_at=1)
    gated.gate.set()
    async with gateway(gated) as (_, client):
        begun = await client.responses.create(input="A?", background=True)
        await until_opened(gated)
        await idle(gated)
        assert (await client.responses.retrieve(begun.id)).status == "in_progress"
        gated.script = Script(TEXT)
        await store.let_go("", begun.id)  # as its expiry does, 15 s later
        assert (await finished(client, begun.id)).output_text == TEXT
        assert len(gated.wanted) == 1


async def test_one_whose_log_is_gone_too_has_failed(gated: GatedService, store: ResponseStore) -> None:
    async with gateway(gated) as (_, client):
        begun = await client.responses.create(input="A?", background=True)
    gated.begun.clear()
    async with gateway(gated) as (_, client):
        done = await finished(client, begun.id)
        assert done.status == "failed"
        assert done.error is not None
        assert "its gateway was lost, and its log too" in done.error.message


async def test_it_counts_as_running_and_is_its_owners_alone(gated: GatedService, tmp_path: Path) -> None:
    async with gateway(gated, api_keys_file=key_file(tmp_path), max_concurrent_requests=1) as (_, client):
        begun = await client.responses.create(input="A?", background=True)
        with pytest.raises(openai.InternalServerError, match="at its limit of 1 requests"):
            await client.responses.create(input="B?", background=True)
        bob = client.with_options(api_key=BOB)
        for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(begun.id)
        gated.gate.set()
        assert (await finished(client, begun.id)).output_text == TEXT


async def test_its_owner_can_cancel_it_while_it_holds_every_place(gated: GatedService, tmp_path: Path) -> None:
    async with gateway(gated, api_keys_file=key_file(tmp_path), max_concurrent_requests=1) as (_, client):
        begun = await client.responses.create(input="A?", background=True)
        assert (await client.responses.cancel(begun.id)).status == "cancelled"
        await idle(gated)
        gated.gate.set()
        assert (await client.with_options(api_key=BOB).responses.create(input="B?")).output_text == TEXT


@pytest.mark.parametrize(
    ("body", "param"),
    [({"store": False}, "background"), ({"request_id": "r"}, "request_id")],
)
async def test_what_makes_no_sense_is_refused(gated: GatedService, body: dict[str, Any], param: str) -> None:
    async with gateway(gated) as (servers, _), httpx.AsyncClient(base_url=servers.url) as http:
        refused = await http.post("/v1/responses", json={"input": "A?", "background": True, **body})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        after = await http.get("/v1/responses/resp_x?stream=true&starting_after=-1")
        assert (after.status_code, after.json()["error"]["param"]) == (400, "starting_after")
