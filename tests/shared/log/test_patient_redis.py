"""Waiting for a real Redis that is stopped, frozen, full or a replica: a pause, and an error only when it lasts."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import redis.asyncio as aioredis

from outrider.shared.errors import InternalError, Unavailable
from outrider.shared.log.patient_redis import PatientRedis, RedisState
from tests.redis_server import RedisServer

PATIENCE_S = 3.0
# A machine that is busy otherwise.
SLACK_S = 30.0
# Where patience must not end before the trouble does, however slowly Redis comes back.
LONG_PATIENCE_S = 60.0
OK = b"OK"
COUNT_SCRIPT = "return redis.call('INCR', KEYS[1])"


@asynccontextmanager
async def patient_for(redis_server: RedisServer, patience_s: float) -> AsyncIterator[PatientRedis]:
    redis = PatientRedis.connect(redis_server.url, patience_s=patience_s, scripts=[COUNT_SCRIPT])
    await redis.start()
    yield redis
    await redis.close()


@pytest.fixture
async def patient(redis_server: RedisServer, redis_client: aioredis.Redis) -> AsyncIterator[PatientRedis]:
    async with patient_for(redis_server, PATIENCE_S) as redis:
        yield redis


@pytest.fixture
async def long_patient(redis_server: RedisServer, redis_client: aioredis.Redis) -> AsyncIterator[PatientRedis]:
    async with patient_for(redis_server, LONG_PATIENCE_S) as redis:
        yield redis


def put(key: str, value: str = "1") -> Any:
    return lambda: ("SET", key, value)


async def outcomes(*calls: Any) -> list[Any]:
    return await asyncio.gather(*calls, return_exceptions=True)


async def test_the_sender_wakes_once_for_each_command(patient: PatientRedis, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that has its reply is not waited for again."""
    look, num_looks = patient._arrivals, 0

    async def counted(waiting: list[Any]) -> list[Any]:
        nonlocal num_looks
        num_looks += 1
        return await look(waiting)

    monkeypatch.setattr(patient, "_arrivals", counted)
    for number in range(20):
        assert await patient.call(put(f"one-{number}")) == OK
    assert num_looks <= 21


async def test_everything_that_waits_ends_when_its_own_patience_does(
    redis_server: RedisServer, patient: PatientRedis
) -> None:
    """Not one after the other: 60 callers of a Redis that is down wait once, not 60 times."""
    await asyncio.to_thread(redis_server.stop)
    started = time.monotonic()
    try:
        first = asyncio.create_task(outcomes(*(patient.call(put(f"early-{number}")) for number in range(30))))
        await asyncio.sleep(PATIENCE_S / 2)
        late_started = time.monotonic()
        late = await outcomes(*(patient.call(put(f"late-{number}")) for number in range(30)))
        late_s = time.monotonic() - late_started
        early = await first
    finally:
        await asyncio.to_thread(redis_server.start)
    assert all(isinstance(outcome, Unavailable) for outcome in early + late)
    assert "Redis has not answered for 3 s" in early[0].message
    assert "refused" in early[0].message or "Connect" in early[0].message
    assert PATIENCE_S * 0.9 < late_s < PATIENCE_S + SLACK_S
    assert time.monotonic() - started < 1.5 * PATIENCE_S + 2 * SLACK_S
    assert await patient.call(put("after")) == OK


async def test_an_outage_within_the_patience_is_a_pause(redis_server: RedisServer, long_patient: PatientRedis) -> None:
    await asyncio.to_thread(redis_server.stop)
    waiting = asyncio.create_task(outcomes(*(long_patient.call(put(f"k{number}")) for number in range(20))))
    await asyncio.sleep(PATIENCE_S / 6)
    assert not waiting.done()
    await asyncio.to_thread(redis_server.start)
    assert await waiting == [OK] * 20
    assert len(await long_patient.call(lambda: ("KEYS", "k*"))) == 20


async def test_a_redis_that_hangs_is_bounded_by_the_same_patience(
    redis_server: RedisServer, patient: PatientRedis
) -> None:
    redis_server.freeze()
    started = time.monotonic()
    try:
        [outcome] = await outcomes(patient.call(put("x")))
        seconds = time.monotonic() - started
        assert not (await patient.check_write("check")).answers
    finally:
        redis_server.thaw()
    assert isinstance(outcome, Unavailable)
    assert PATIENCE_S * 0.9 < seconds < PATIENCE_S + SLACK_S
    assert await patient.call(put("x")) == OK


async def test_a_redis_that_hangs_for_a_while_is_a_pause(redis_server: RedisServer, long_patient: PatientRedis) -> None:
    redis_server.freeze()
    waiting = asyncio.create_task(long_patient.call(put("y")))
    await asyncio.sleep(PATIENCE_S / 4)
    redis_server.thaw()
    assert await waiting == OK


async def test_a_full_redis_is_waited_for(long_patient: PatientRedis, redis_client: aioredis.Redis) -> None:
    await redis_client.config_set("maxmemory", 1)
    waiting = asyncio.create_task(long_patient.call(put("z")))
    try:
        await asyncio.sleep(PATIENCE_S / 4)
        assert not waiting.done()
    finally:
        await redis_client.config_set("maxmemory", 0)
    assert await waiting == OK


async def test_a_redis_that_stays_full_says_so(patient: PatientRedis, redis_client: aioredis.Redis) -> None:
    await redis_client.config_set("maxmemory", 1)
    try:
        with pytest.raises(Unavailable, match="maxmemory"):
            await patient.call(put("z"))
        assert await patient.call(lambda: ("GET", "z")) is None, "reading goes on meanwhile"
    finally:
        await redis_client.config_set("maxmemory", 0)


async def test_a_check_tells_a_full_and_a_read_only_redis(patient: PatientRedis, redis_client: aioredis.Redis) -> None:
    await redis_client.config_set("maxmemory", 1)
    full = await patient.check_write("check")
    await redis_client.config_set("maxmemory", 0)
    await redis_client.execute_command("REPLICAOF", "127.0.0.1", "1")
    read_only = await patient.check_write("check")
    await redis_client.execute_command("REPLICAOF", "NO", "ONE")
    assert (full.answers, read_only.answers) == (True, True)
    assert "maxmemory" in full.refusal
    assert "read only replica" in read_only.refusal
    assert await patient.check_write("check") == RedisState(answers=True)
    assert 0 < await redis_client.ttl("check") <= 60


async def test_a_replica_is_waited_for_until_it_is_a_master(
    patient: PatientRedis, long_patient: PatientRedis, redis_client: aioredis.Redis
) -> None:
    await redis_client.execute_command("REPLICAOF", "127.0.0.1", "1")
    waiting = asyncio.create_task(long_patient.call(put("r")))
    try:
        await asyncio.sleep(PATIENCE_S / 4)
        assert not waiting.done()
        with pytest.raises(Unavailable, match="read only replica"):
            await patient.call(put("r2"))
    finally:
        await redis_client.execute_command("REPLICAOF", "NO", "ONE")
    assert await waiting == OK
    assert await patient.call(put("r3")) == OK


async def test_one_command_that_is_put_off_holds_up_no_other(
    redis_server: RedisServer, redis_client: aioredis.Redis
) -> None:
    async with patient_for(redis_server, 3 * PATIENCE_S) as redis:
        stuck = asyncio.create_task(
            outcomes(redis.call(lambda: ("EVAL", "return redis.error_reply('MISCONF no disk')", 0)))
        )
        for number in range(100):
            assert await redis.call(put(f"free-{number}")) == OK
        assert not stuck.done()
        [outcome] = await stuck
    assert isinstance(outcome, Unavailable)
    assert "MISCONF no disk" in outcome.message


async def test_a_wrong_command_fails_alone(patient: PatientRedis, redis_client: aioredis.Redis) -> None:
    await redis_client.set("text", "a")
    wrong, right = await outcomes(patient.call(lambda: ("LPUSH", "text", 1)), patient.call(put("right")))
    assert isinstance(wrong, InternalError)
    assert "WRONGTYPE" in wrong.message
    assert right == OK


async def test_scripts_are_loaded_again_where_they_are_missing(
    patient: PatientRedis, redis_client: aioredis.Redis
) -> None:
    sha = await redis_client.script_load(COUNT_SCRIPT)
    await redis_client.script_flush()
    assert await patient.call(lambda: ("EVALSHA", sha, 1, "counter")) == 1


async def test_a_connection_that_hangs_while_scripts_are_loaded_is_given_up(
    long_patient: PatientRedis, redis_client: aioredis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one half-open connection at that moment would stop every command until it is noticed."""
    load, calls = long_patient._client.script_load, []

    async def hangs_once(script: str) -> Any:
        calls.append(script)
        return await (asyncio.Event().wait() if len(calls) == 1 else load(script))

    sha = await redis_client.script_load(COUNT_SCRIPT)
    await redis_client.script_flush()
    monkeypatch.setattr(long_patient._client, "script_load", hangs_once)
    assert await asyncio.wait_for(long_patient.call(lambda: ("EVALSHA", sha, 1, "counter")), SLACK_S) == 1
    assert len(calls) == 2


async def test_closing_fails_what_waits(redis_server: RedisServer, redis_client: aioredis.Redis) -> None:
    redis = PatientRedis.connect(redis_server.url, patience_s=60, scripts=[])
    await redis.start()
    await asyncio.to_thread(redis_server.stop)
    try:
        waiting = asyncio.create_task(outcomes(*(redis.call(put(str(number))) for number in range(5))))
        await asyncio.sleep(0.1)
        await redis.close()
        assert {type(outcome) for outcome in await asyncio.wait_for(waiting, 30)} == {Unavailable}
        with pytest.raises(Unavailable):
            await redis.call(put("late"))
    finally:
        await asyncio.to_thread(redis_server.start)


@pytest.mark.parametrize("trouble", ["down", "hangs"])
async def test_starting_waits_for_a_redis_that_is_away(
    redis_server: RedisServer, redis_client: aioredis.Redis, trouble: str
) -> None:
    stop, go_on = (
        (redis_server.stop, redis_server.start) if trouble == "down" else (redis_server.freeze, redis_server.thaw)
    )
    redis = PatientRedis.connect(redis_server.url, patience_s=LONG_PATIENCE_S, scripts=[COUNT_SCRIPT])
    await asyncio.to_thread(stop)
    starting = asyncio.create_task(redis.start())
    try:
        await asyncio.sleep(PATIENCE_S)
        assert not starting.done()
    finally:
        await asyncio.to_thread(go_on)
    await starting
    assert await redis.call(put("x")) == OK
    await redis.close()


async def test_starting_with_a_wrong_password_is_told_at_once(
    redis_server: RedisServer, redis_client: aioredis.Redis
) -> None:
    redis = PatientRedis.connect(redis_server.url.replace("redis://", "redis://:wrong@"), patience_s=3600, scripts=[])
    await redis_client.config_set("requirepass", "right")
    try:
        with pytest.raises(Unavailable, match=r"WRONGPASS|invalid"):
            await asyncio.wait_for(redis.start(), 60)
    finally:
        await redis_client.config_set("requirepass", "")
        await redis.close()


async def test_starting_without_redis_is_unavailable() -> None:
    redis = PatientRedis.connect("redis://127.0.0.1:1/0", patience_s=1, scripts=[])
    with pytest.raises(Unavailable):
        await redis.start()
    await redis.close()
