"""The commit log against a real redis-server: what it takes, what it refuses, and what survives a restart."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import redis.asyncio as aioredis

from shared.commit_log import CommitLog, LogEntry
from shared.errors import CommitRefused, Unavailable
from tests.redis_server import RedisServer

TTL_S = 600
RETRY_S = 1.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture
async def client(server: RedisServer) -> AsyncIterator[aioredis.Redis]:
    connection = aioredis.Redis.from_url(server.url)
    await connection.flushall()
    yield connection
    await connection.aclose()


@pytest.fixture
async def log(server: RedisServer, client: aioredis.Redis) -> AsyncIterator[CommitLog]:
    commit_log = CommitLog.connect(server.url, ttl_s=TTL_S, retry_s=RETRY_S)
    await commit_log.start()
    yield commit_log
    await commit_log.close()


async def append(log: CommitLog, base_len: int, *token_ids: int, epoch: int = 1, finish: int = 0) -> None:
    await log.append("s", epoch=epoch, base_len=base_len, token_ids=token_ids, finish_reason=finish)


async def test_what_was_appended_is_read_back_in_order(log: CommitLog) -> None:
    await append(log, 0, 7, 8, 2**32 - 1)
    await append(log, 3, 9)
    await append(log, 4, 0, 5, finish=2)
    assert await log.read("s") == [
        LogEntry(0, (7, 8, 2**32 - 1), 0),
        LogEntry(3, (9,), 0),
        LogEntry(4, (0, 5), 2),
    ]


async def test_an_unknown_session_reads_as_empty(log: CommitLog) -> None:
    assert await log.read("nobody") == []


async def test_an_entry_id_is_the_index_of_its_first_token_plus_one(log: CommitLog, client: aioredis.Redis) -> None:
    await append(log, 0, 1, 2, 3)
    await append(log, 3, 4)
    entries = await client.xrange("outrider:{s}:log")
    assert [entry_id for entry_id, _ in entries] == [b"1-0", b"4-0"]


async def test_both_keys_expire(log: CommitLog, client: aioredis.Redis) -> None:
    await append(log, 0, 1)
    for key in ("outrider:{s}:log", "outrider:{s}:state"):
        assert TTL_S - 30 < await client.ttl(key) <= TTL_S
    await client.expire("outrider:{s}:log", 5)
    await append(log, 1, 2)
    assert await client.ttl("outrider:{s}:log") > TTL_S - 30, "an append starts the time anew"


@pytest.mark.parametrize(
    ("base_len", "token_ids"),
    [(4, (1,)), (2, (1,)), (0, (1, 2, 4)), (0, (1, 2)), (0, (1, 2, 3, 4)), (1, (2, 3))],
    ids=["gap", "overlap", "other tokens", "fewer tokens", "more tokens", "other start"],
)
async def test_gaps_and_repeats_with_other_content_are_refused(
    log: CommitLog, base_len: int, token_ids: tuple[int, ...]
) -> None:
    await append(log, 0, 1, 2, 3)
    with pytest.raises(CommitRefused):
        await append(log, base_len, *token_ids)
    assert await log.read("s") == [LogEntry(0, (1, 2, 3), 0)]


async def test_a_first_append_that_is_not_at_zero_is_refused(log: CommitLog) -> None:
    with pytest.raises(CommitRefused):
        await append(log, 1, 5)
    assert await log.read("s") == []


async def test_the_same_append_once_more_counts_as_appended_and_is_not_written_twice(log: CommitLog) -> None:
    await append(log, 0, 1, 2)
    await append(log, 2, 3, finish=1)
    await append(log, 2, 3, finish=1)
    await append(log, 0, 1, 2)
    assert await log.read("s") == [LogEntry(0, (1, 2), 0), LogEntry(2, (3,), 1)]
    with pytest.raises(CommitRefused):
        await append(log, 2, 3, finish=2)


async def test_the_same_empty_append_once_more_counts_as_appended(log: CommitLog) -> None:
    await append(log, 0, 1)
    await append(log, 1, finish=3)
    await append(log, 1, finish=3)
    assert await log.read("s") == [LogEntry(0, (1,), 0), LogEntry(1, (), 3)]


async def test_an_old_epoch_is_fenced_off_for_good(log: CommitLog) -> None:
    await append(log, 0, 1, epoch=1)
    await append(log, 1, 2, epoch=3)
    for epoch in (1, 2):
        with pytest.raises(CommitRefused):
            await append(log, 2, 9, epoch=epoch)
    with pytest.raises(CommitRefused):
        await append(log, 0, 1, epoch=1)  # even the very append that it once made
    await append(log, 2, 3, epoch=3)
    assert [entry.token_ids for entry in await log.read("s")] == [(1,), (2,), (3,)]


async def test_a_new_epoch_must_still_fit_the_log(log: CommitLog) -> None:
    await append(log, 0, 1, 2, epoch=1)
    with pytest.raises(CommitRefused):
        await append(log, 1, 2, epoch=2)
    await append(log, 2, 3, epoch=1)  # a refused append fences nobody off


async def test_two_gateways_race_for_one_index_and_one_wins(server: RedisServer, log: CommitLog) -> None:
    rival = CommitLog.connect(server.url, ttl_s=TTL_S)
    await rival.start()
    try:
        for index in range(20):
            outcomes = await asyncio.gather(
                append(log, index, 100 + index), append(rival, index, 200 + index), return_exceptions=True
            )
            assert sorted(type(outcome) for outcome in outcomes if outcome is not None) == [CommitRefused]
    finally:
        await rival.close()
    assert len(await log.read("s")) == 20


async def test_many_sessions_travel_in_few_pipelines_and_a_refusal_touches_only_its_own(
    log: CommitLog, client: aioredis.Redis
) -> None:
    async def session(name: str) -> None:
        for index in range(10):
            await log.append(name, epoch=1, base_len=index, token_ids=(index,), finish_reason=0)

    async def broken() -> None:
        await log.append("gap", epoch=1, base_len=7, token_ids=(1,), finish_reason=0)

    reads_before = (await client.info("stats"))["total_reads_processed"]
    names = [f"session-{number}" for number in range(50)]
    outcomes = await asyncio.gather(*(session(name) for name in names), broken(), return_exceptions=True)
    reads = (await client.info("stats"))["total_reads_processed"] - reads_before
    assert [type(outcome) for outcome in outcomes if outcome is not None] == [CommitRefused]
    for name in names:
        assert [entry.token_ids for entry in await log.read(name)] == [(index,) for index in range(10)]
    assert reads < 250, f"{reads} reads of the socket for 500 appends that were ready 50 at a time"


async def test_it_goes_on_after_the_script_was_flushed(log: CommitLog, client: aioredis.Redis) -> None:
    await append(log, 0, 1)
    await client.script_flush()
    await asyncio.gather(
        append(log, 1, 2), *(log.append(name, epoch=1, base_len=0, token_ids=(3,), finish_reason=0) for name in "abc")
    )
    assert [entry.token_ids for entry in await log.read("s")] == [(1,), (2,)]
    for name in "abc":
        assert [entry.token_ids for entry in await log.read(name)] == [(3,)]


async def test_it_goes_on_after_redis_restarted(server: RedisServer, log: CommitLog) -> None:
    await append(log, 0, 1)
    await asyncio.to_thread(server.restart)
    await append(log, 1, 2)
    assert [entry.token_ids for entry in await log.read("s")] == [(1,), (2,)]


async def test_a_restart_in_the_middle_of_many_appends_loses_and_repeats_nothing(
    server: RedisServer, client: aioredis.Redis
) -> None:
    log = CommitLog.connect(server.url, ttl_s=TTL_S, retry_s=20.0)
    await log.start()

    lengths = dict.fromkeys("abcdefgh", 0)
    enough = asyncio.Event()

    async def session(name: str) -> None:
        while not enough.is_set():
            index = lengths[name]
            await log.append(name, epoch=1, base_len=index, token_ids=(index,), finish_reason=0)
            lengths[name] += 1

    writers = [asyncio.create_task(session(name)) for name in lengths]
    try:
        for _ in range(3):
            await asyncio.sleep(0.05)
            await asyncio.to_thread(server.restart)
        await asyncio.sleep(0.05)
        enough.set()
        await asyncio.gather(*writers)
        assert min(lengths.values()) > 10
        for name, length in lengths.items():
            assert [entry.token_ids for entry in await log.read(name)] == [(index,) for index in range(length)]
    finally:
        await log.close()


async def test_a_redis_that_is_down_is_unavailable_and_may_come_back(server: RedisServer, log: CommitLog) -> None:
    await append(log, 0, 1)
    await asyncio.to_thread(server.stop)
    try:
        assert not await log.ping()
        started = time.perf_counter()
        for failing in (append(log, 1, 2), log.read("s")):
            with pytest.raises(Unavailable):
                await failing
        elapsed_s = time.perf_counter() - started
    finally:
        await asyncio.to_thread(server.start)
    assert elapsed_s < 15.0
    assert await log.ping()
    await append(log, 1, 2)
    assert [entry.token_ids for entry in await log.read("s")] == [(1,), (2,)]


async def test_starting_without_redis_is_unavailable() -> None:
    commit_log = CommitLog.connect("redis://127.0.0.1:1/0", ttl_s=TTL_S)
    with pytest.raises(Unavailable):
        await commit_log.start()
    await commit_log.close()


async def test_closing_fails_what_still_waits(server: RedisServer, client: aioredis.Redis) -> None:
    commit_log = CommitLog.connect(server.url, ttl_s=TTL_S)
    await commit_log.start()
    waiting = [asyncio.create_task(append(commit_log, 0, 1)) for _ in range(20)]
    await asyncio.sleep(0)
    await commit_log.close()
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), timeout=5.0)
    assert all(outcome is None or isinstance(outcome, Unavailable) for outcome in outcomes)
    with pytest.raises(Unavailable):
        await asyncio.wait_for(append(commit_log, 0, 1), timeout=5.0)
