"""Redis loses its last second, is emptied, hangs or is full in the middle of streams: a pause, or the truth."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
import redis.asyncio as aioredis
from e2e_gateways import HTTP_TIMEOUT_S, Fleet, Gateway, Told, read_events, run_fleet
from e2e_rest import speculation
from e2e_stack import wait_until

from outrider.gateway.config import GatewayConfig

pytestmark = pytest.mark.storm
NUM_TOKENS = 600
# Redis is troubled once so many tokens were read.
AFTER = 30
PATIENCE_S = 4.0
# What a busy machine may add to it.
SLACK_S = 30.0
WRITE_TIMEOUT_S = 60.0
COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {
    "prompt": "class Queue:\n    def __init__(self):\n",
    "max_tokens": NUM_TOKENS,
    "temperature": 0.9,
    "seed": 99,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "stream": True,
    **speculation("ngram", 3, annotate=True),
}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with run_fleet(tmp_path_factory.mktemp("fleet"), draft_model="", methods=("ngram",)) as running:
        yield running


@pytest.fixture(scope="module")
def patient(fleet: Fleet) -> Gateway:
    return fleet.gateway(redis_patience_s="60")


@pytest.fixture(scope="module")
def impatient(fleet: Fleet) -> Gateway:
    return fleet.gateway(redis_patience_s=str(PATIENCE_S))


@pytest.fixture
async def http(patient: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with patient.client() as client:
        yield client


@pytest.fixture(scope="module")
async def undisturbed(fleet: Fleet) -> Told:
    async with httpx.AsyncClient(base_url=fleet.state.url, timeout=HTTP_TIMEOUT_S) as http:
        told = await read_events(http, "POST", COMPLETIONS, body={**BODY, **speculation("off", annotate=True)})
    assert told.done
    return told


@pytest.fixture
async def redis(fleet: Fleet) -> AsyncIterator[aioredis.Redis]:
    connection = aioredis.Redis.from_url(fleet.redis.url)
    yield connection
    await connection.aclose()


async def troubled(
    http: httpx.AsyncClient, trouble: Callable[[], None], *, ended: Callable[[], None] = lambda: None, **fields: Any
) -> Told:
    """The stream, with `trouble()` on another thread once enough was read; it is over before the output is.

    ended() is called when the stream has ended, be it by the trouble.
    """
    begun: list[asyncio.Task[None]] = []
    read_by_then: list[int] = []

    async def make(told: Told) -> None:
        await asyncio.to_thread(trouble)
        read_by_then.append(told.num_tokens())

    def check(told: Told) -> bool:
        if not begun and told.num_tokens() >= AFTER:
            begun.append(asyncio.get_running_loop().create_task(make(told)))
        return False

    told = await read_events(http, "POST", COMPLETIONS, body={**BODY, **fields}, until=check)
    ended()
    assert begun, told
    await begun[0]
    assert read_by_then[0] < NUM_TOKENS * fields.get("n", 1)
    return told


async def num_restores(http: httpx.AsyncClient) -> int:
    match = re.search(r"^outrider:commit_log_restores\{.*\} (\d+)", (await http.get("/metrics")).text, re.MULTILINE)
    assert match is not None
    return int(match[1])


async def check_whole(http: httpx.AsyncClient, told: Told, undisturbed: Told) -> None:
    """The client has everything, and so has the log."""
    assert told.done, told.error
    assert (told.text(), told.token_ids()) == (undisturbed.text(), undisturbed.token_ids())
    again = await read_events(http, "GET", f"/v1/streams/{told.events[0]['id']}")
    assert again.blocks == told.blocks


async def test_a_restart_without_the_last_entries(fleet: Fleet, http: httpx.AsyncClient, undisturbed: Told) -> None:
    num_bytes: list[int] = []

    def lose() -> None:
        num_bytes.append(fleet.redis.num_bytes_written())
        # What is written meanwhile is lost.
        wait_until(lambda: fleet.redis.num_bytes_written() > num_bytes[0] + 2_000, WRITE_TIMEOUT_S, "entries in Redis")
        fleet.redis.lose_what_came_after(num_bytes[0])

    before = await num_restores(http)
    told = await troubled(http, lose)
    await check_whole(http, told, undisturbed)
    assert await num_restores(http) == before + 1


async def test_a_redis_that_was_emptied(
    fleet: Fleet, http: httpx.AsyncClient, undisturbed: Told, redis: aioredis.Redis
) -> None:
    told = await troubled(http, lambda: asyncio.run(_flush(fleet.redis.url)), n=2)
    assert told.done, told.error
    assert told.token_ids(0) == undisturbed.token_ids(0)
    again = await read_events(http, "GET", f"/v1/streams/{told.events[0]['id']}")
    assert [again.token_ids(index) for index in range(2)] == [told.token_ids(index) for index in range(2)]
    ended_ttl_s = GatewayConfig().ended_ttl_s
    assert ended_ttl_s - SLACK_S < await redis.ttl(f"outrider:{{{told.events[0]['id']}}}:record") <= ended_ttl_s


async def _flush(url: str) -> None:
    connection = aioredis.Redis.from_url(url)
    await connection.flushall()
    await connection.aclose()


async def test_streams_pause_while_redis_hangs(fleet: Fleet, http: httpx.AsyncClient, undisturbed: Told) -> None:
    def hang() -> None:
        fleet.redis.freeze()
        time.sleep(5)
        fleet.redis.thaw()

    told = await troubled(http, hang)
    await check_whole(http, told, undisturbed)


async def test_one_that_hangs_for_too_long_ends_the_stream_with_what_is_committed(
    fleet: Fleet, impatient: Gateway, undisturbed: Told
) -> None:
    async with impatient.client() as http:
        frozen_at: list[float] = []

        def freeze() -> None:
            frozen_at.append(time.monotonic())
            fleet.redis.freeze()

        try:
            told = await troubled(http, freeze)
            seconds = time.monotonic() - frozen_at[0]
            refused = await http.post(COMPLETIONS, json={**BODY, "max_tokens": 4, "stream": False})
            assert (await http.get("/ready")).status_code == 503
        finally:
            fleet.redis.thaw()
        # A commit that was on its way when Redis stopped has waited for longer than Redis has been away.
        assert PATIENCE_S / 2 < seconds < PATIENCE_S + SLACK_S
        assert told.error is not None
        assert (told.error["code"], told.error["type"]) == (503, "service_unavailable_error")
        committed = re.search(
            r"Redis has not answered for 4 s .*output tokens \[0, (\d+)\) are committed", told.error["message"]
        )
        assert committed is not None
        assert len(told.token_ids()) <= int(committed[1]) < NUM_TOKENS
        assert refused.status_code == 503
        assert "Redis has not answered" in refused.json()["error"]["message"]
        rest = await read_events(http, "POST", COMPLETIONS, last_event_id=told.last_id)
        await check_whole(http, told + rest, undisturbed)


async def test_one_that_hangs_for_too_long_is_not_the_end_of_a_response_in_the_background(
    fleet: Fleet, impatient: Gateway, http: httpx.AsyncClient
) -> None:
    """Its gateway gives it up; the other one continues it from the log, to the same text."""
    asked = {"input": "A?", "max_output_tokens": NUM_TOKENS, "temperature": 0}
    whole = (await http.post("/v1/responses", json=asked)).json()
    async with impatient.client() as first:
        begun = (await first.post("/v1/responses", json={**asked, "background": True})).json()
        try:
            fleet.redis.freeze()
            # A commit has waited for too long; what a gateway stores of the end would still arrive.
            await asyncio.sleep(1.5 * PATIENCE_S)
        finally:
            fleet.redis.thaw()
    assert begun.get("status") == "queued", begun
    statuses = []
    async with asyncio.timeout(4 * SLACK_S):
        while (ended := (await http.get(f"/v1/responses/{begun['id']}")).json())["status"] == "in_progress":
            statuses.append(ended["status"])
            await asyncio.sleep(0.2)
    assert statuses, "it ended before Redis was frozen"
    assert (ended["status"], ended["usage"]) == (whole["status"], whole["usage"]), ended["error"]
    assert _text_of(ended) == _text_of(whole)


def _text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", []))


def filling(url: str, until: Callable[[], object]) -> Callable[[], None]:
    """It is full until `until` returns, on this thread."""

    async def fill() -> None:
        connection = aioredis.Redis.from_url(url)
        await connection.config_set("maxmemory", 1)
        await asyncio.to_thread(until)
        await connection.config_set("maxmemory", 0)
        await connection.aclose()

    return lambda: asyncio.run(fill())


async def test_a_full_redis_is_a_pause(fleet: Fleet, http: httpx.AsyncClient, undisturbed: Told) -> None:
    told = await troubled(http, filling(fleet.redis.url, lambda: time.sleep(2.0)))
    await check_whole(http, told, undisturbed)


async def until_ready(http: httpx.AsyncClient) -> None:
    deadline = time.monotonic() + SLACK_S
    while (await http.get("/ready")).status_code != 200:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


async def test_one_that_stays_full_is_an_error_that_says_so(
    fleet: Fleet, impatient: Gateway, undisturbed: Told
) -> None:
    has_ended = threading.Event()
    async with impatient.client() as http:
        full = filling(fleet.redis.url, lambda: has_ended.wait(PATIENCE_S + SLACK_S))
        told = await troubled(http, full, ended=has_ended.set)
        assert told.error is not None
        assert told.error["code"] == 503
        assert "maxmemory" in told.error["message"]
        await until_ready(http)  # requests are refused until the gateway has seen that there is room again
        rest = await read_events(http, "POST", COMPLETIONS, last_event_id=told.last_id)
        await check_whole(http, told + rest, undisturbed)
