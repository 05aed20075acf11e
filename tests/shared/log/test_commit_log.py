"""The commit log against a real redis-server: what it takes, what it refuses, who may write, what survives a loss."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import redis.asyncio as aioredis

from outrider.shared.errors import CommitRefused, QuotaExceeded, Unavailable, UnknownSession
from outrider.shared.log import commit_scripts as scripts
from outrider.shared.log.commit_log import ChoiceLog, CommitLog, LogEntry, RequestLog
from outrider.shared.log.log_budget import LogBudget
from tests.redis_server import RedisServer

TTL_S = 600
# Where patience must not end: a Redis that is started anew takes its time on a busy machine.
PATIENCE_S = 60.0
SHORT_PATIENCE_S = 3.0
RECORD = b"what was asked for"
STEM = "outrider:{r}"


@asynccontextmanager
async def gateway(
    redis_server: RedisServer,
    *,
    patience_s: float = PATIENCE_S,
    ttl_s: int = TTL_S,
    ended_ttl_s: int | None = None,
    budget: LogBudget | None = None,
) -> AsyncIterator[CommitLog]:
    """The commit log as one gateway process has it."""
    log = CommitLog.connect(
        redis_server.url, ttl_s=ttl_s, patience_s=patience_s, ended_ttl_s=ended_ttl_s, budget=budget
    )
    await log.start()
    try:
        yield log
    finally:
        await log.close()


@pytest.fixture
async def log(redis_server: RedisServer, redis_client: aioredis.Redis) -> AsyncIterator[CommitLog]:
    async with gateway(redis_server) as running:
        yield running


@pytest.fixture
async def other_log(redis_server: RedisServer, redis_client: aioredis.Redis) -> AsyncIterator[CommitLog]:
    async with gateway(redis_server) as running:
        yield running


def entry(base_len: int, *token_ids: int, finish: int = 0, epoch: int = 0, extras: bytes = b"") -> LogEntry:
    return LogEntry(base_len, token_ids, finish, epoch, extras)


async def append(choice: ChoiceLog, *token_ids: int, finish: int = 0) -> None:
    await choice.append(entry(choice.logged_len, *token_ids, finish=finish))


async def read(log: CommitLog, choice: int = 0, request_id: str = "r") -> tuple[LogEntry, ...]:
    found = await log.find(request_id)
    assert found is not None
    return (await found.read([choice]))[choice]


async def tokens(log: CommitLog, choice: int = 0) -> list[int]:
    return [token_id for logged in await read(log, choice) for token_id in logged.token_ids]


async def take_over(log: CommitLog, *choices: int, request_id: str = "r") -> tuple[RequestLog, list[ChoiceLog]]:
    """As another gateway does it."""
    found = await log.find(request_id)
    assert found is not None
    terms = await found.claim(choices)
    entries = await found.read(choices)
    return found, [found.choice(choice, term=terms[choice], entries=entries[choice]) for choice in choices]


# ---- what is written ---------------------------------------------------------------------------------------------


async def test_what_was_appended_is_read_back_in_order(log: CommitLog, other_log: CommitLog) -> None:
    choice = log.new("r", RECORD).choice(3)
    entries = (
        entry(0, 7, 8, 2**32 - 1, extras=b"\x00\xff extras"),
        entry(3, 9, epoch=65537),
        entry(4, 0, 5, finish=2),
    )
    for one in entries:
        await choice.append(one)
    assert await read(other_log, 3) == entries
    found = await other_log.find("r")
    assert found is not None
    assert found.record == RECORD
    assert (await found.read([0, 3])) == {0: (), 3: entries}


async def test_an_unknown_request_is_not_found(log: CommitLog) -> None:
    assert await log.find("nobody") is None


async def test_the_record_is_there_before_the_first_entry(log: CommitLog, redis_client: aioredis.Redis) -> None:
    request = log.new("r", RECORD)
    choice = request.choice(0)
    request.begin()
    await append(choice, 1)
    assert await redis_client.get(f"{STEM}:record") == RECORD


async def test_an_entry_id_is_the_index_of_its_first_token_plus_one(
    log: CommitLog, redis_client: aioredis.Redis
) -> None:
    choice = log.new("r", RECORD).choice(0)
    await append(choice, 1, 2, 3)
    await append(choice, 4)
    assert [entry_id for entry_id, _ in await redis_client.xrange(f"{STEM}:0:log")] == [b"1-0", b"4-0"]


async def test_all_keys_expire_and_an_append_starts_the_time_anew(log: CommitLog, redis_client: aioredis.Redis) -> None:
    choice = log.new("r", RECORD).choice(0)
    await append(choice, 1)
    keys = {key.decode() for key in await redis_client.keys("*")}
    assert keys == {f"{STEM}:record", f"{STEM}:0:log", f"{STEM}:0:fence"}
    for key in keys:
        assert TTL_S - 30 < await redis_client.ttl(key) <= TTL_S
        await redis_client.expire(key, 60)
    await append(choice, 2)
    for key in keys:
        assert await redis_client.ttl(key) > TTL_S - 30


async def test_a_choice_that_has_ended_lives_as_long_as_the_others(
    redis_server: RedisServer, redis_client: aioredis.Redis
) -> None:
    async with gateway(redis_server, ttl_s=8) as log:
        request = log.new("r", RECORD)
        ended, runs = request.choice(0), request.choice(1)
        await append(ended, 1, finish=1)
        for _ in range(20):
            await append(runs, 2)
            await asyncio.sleep(0.5)
        assert await read(log, 0) == (entry(0, 1, finish=1),)


@pytest.mark.parametrize("base_len", [0, 2, 4])
async def test_gaps_and_repeats_are_refused(log: CommitLog, base_len: int) -> None:
    choice = log.new("r", RECORD).choice(0)
    await append(choice, 1, 2, 3)
    with pytest.raises(CommitRefused):
        await choice.append(entry(base_len, 9))
    assert await tokens(log) == [1, 2, 3]


async def test_the_server_refuses_what_does_not_fit(log: CommitLog) -> None:
    """By itself, whatever the gateway believes: a gap, an overlap, other tokens, fewer, more, other extras."""
    request = log.new("r", RECORD)
    await append(request.choice(0), 1, 2, 3)
    wrong = [entry(4, 1), entry(2, 1), entry(0, 1, 2, 4), entry(0, 1, 2), entry(0, 1, 2, 3, 4), entry(1, 2, 3)]
    for one in (*wrong, entry(0, 1, 2, 3, extras=b"x"), entry(0, 1, 2, 3, finish=1)):
        assert await send_append(log, request, one) == scripts.DOES_NOT_FIT
    assert await tokens(log) == [1, 2, 3]


async def send_append(log: CommitLog, request: RequestLog, one: LogEntry, term: int = 0) -> object:
    """The bare script, as a connection that was lost before its reply makes it arrive again."""
    packed = b"".join(token_id.to_bytes(4, "little") for token_id in one.token_ids)
    fields = (one.base_len, len(one.token_ids), packed, one.finish_reason, one.epoch, one.extras)
    keys = request.keys
    named = (keys.log(0), keys.fence(0), keys.record)
    return await log.run_script(
        scripts.APPEND, named, lambda: (term, request.holder, TTL_S, *fields, request.record_head)
    )


async def test_the_same_append_once_more_counts_as_appended_and_is_not_written_twice(log: CommitLog) -> None:
    request = log.new("r", RECORD)
    choice = request.choice(0)
    entries = (entry(0, 1, 2, extras=b"a"), entry(2, 3), entry(3, finish=3))
    for one in entries:
        await choice.append(one)
    for one in (*entries, *reversed(entries)):
        assert await send_append(log, request, one) == scripts.APPENDED
    assert await read(log) == entries


async def test_many_choices_travel_in_few_pipelines(log: CommitLog, redis_client: aioredis.Redis) -> None:
    async def session(choice: ChoiceLog) -> None:
        for index in range(10):
            await append(choice, index)

    reads_before = (await redis_client.info("stats"))["total_reads_processed"]
    requests = [log.new(f"request-{number}", RECORD) for number in range(50)]
    await asyncio.gather(*(session(request.choice(0)) for request in requests))
    reads = (await redis_client.info("stats"))["total_reads_processed"] - reads_before
    for number in range(50):
        logged = await read(log, request_id=f"request-{number}")
        assert [one.token_ids for one in logged] == [(index,) for index in range(10)]
    assert reads < 250, f"{reads} reads of the socket for 550 writes that were ready 50 at a time"


# ---- who may write -----------------------------------------------------------------------------------------------


async def test_a_second_request_with_the_same_id_is_refused(log: CommitLog, other_log: CommitLog) -> None:
    choice = log.new("r", RECORD).choice(0)
    await append(choice, 1)
    with pytest.raises(CommitRefused, match="already exists"):
        await append(other_log.new("r", b"something else").choice(0), 1)
    await append(choice, 2)
    assert await tokens(log) == [1, 2]


async def test_tokens_of_a_lost_record_do_not_go_under_another_requests(
    log: CommitLog, other_log: CommitLog, redis_client: aioredis.Redis
) -> None:
    """Redis has lost a request that had no token yet, and its id has been used again."""
    request = log.new("r", RECORD)
    await request.begun()
    await redis_client.flushall()
    other_request = other_log.new("r", b"something else")
    await other_request.begun()
    other = other_request.choice(0)
    with pytest.raises(CommitRefused, match="taken over"):
        await append(request.choice(0), 1)
    await append(other, 2)
    assert await tokens(log) == [2]


async def test_a_claim_is_of_the_record_that_was_read(
    log: CommitLog, other_log: CommitLog, redis_client: aioredis.Redis
) -> None:
    await log.new("r", RECORD).begun()
    found = await log.find("r")
    assert found is not None
    await redis_client.flushall()
    other = other_log.new("r", b"something else").choice(0)
    await append(other, 2)
    with pytest.raises(UnknownSession):
        await found.claim([0])
    await append(other, 3)
    assert await tokens(log) == [2, 3]


async def test_a_claim_passes_over_the_gateway_that_was_writing(log: CommitLog, other_log: CommitLog) -> None:
    old = log.new("r", RECORD).choice(0)
    await append(old, 1, 2)
    _, [new] = await take_over(other_log, 0)
    assert (new.term, new.logged_len) == (1, 2)
    with pytest.raises(
        CommitRefused, match=r"another connection has taken over .*output tokens \[0, 2\) are committed"
    ):
        await append(old, 9)
    await append(new, 3)
    with pytest.raises(CommitRefused):
        await append(old, 9)
    assert await tokens(log) == [1, 2, 3]


async def test_a_choice_that_never_began_can_be_claimed(log: CommitLog, other_log: CommitLog) -> None:
    request = log.new("r", RECORD)
    await request.begun()
    _, [new] = await take_over(other_log, 0)
    with pytest.raises(CommitRefused):
        await append(request.choice(0), 9)
    await append(new, 1)
    assert await tokens(log) == [1]


async def test_of_two_claims_at_once_one_gets_all_choices(log: CommitLog, other_log: CommitLog) -> None:
    request = log.new("r", RECORD)
    await request.begun()
    choices = list(range(20))
    for _ in range(5):
        claims = await asyncio.gather(take_over(log, *choices), take_over(other_log, *choices))
        winners = set()
        for choice in choices:
            outcomes = await asyncio.gather(*(append(rows[choice], 1) for _, rows in claims), return_exceptions=True)
            assert [type(outcome) for outcome in outcomes if outcome is not None] == [CommitRefused]
            winners.add(outcomes.index(None))
        assert len(winners) == 1


async def test_a_claim_sent_twice_is_one_claim(log: CommitLog) -> None:
    request = log.new("r", RECORD)
    await append(request.choice(0), 1)
    found = await log.find("r")
    assert found is not None
    assert await found.claim([0, 1]) == await found.claim([0, 1]) == {0: 1, 1: 1}


async def test_a_request_that_has_expired_cannot_be_claimed(log: CommitLog, redis_client: aioredis.Redis) -> None:
    await append(log.new("r", RECORD).choice(0), 1)
    found = await log.find("r")
    assert found is not None
    await redis_client.flushall()
    with pytest.raises(UnknownSession):
        await found.claim([0])


# ---- what survives a restart -------------------------------------------------------------------------------------


async def test_it_goes_on_after_the_scripts_were_flushed(log: CommitLog, redis_client: aioredis.Redis) -> None:
    choice = log.new("r", RECORD).choice(0)
    await append(choice, 1)
    await redis_client.script_flush()
    others = [log.new(name, RECORD).choice(0) for name in "abc"]
    await asyncio.gather(append(choice, 2), *(append(other, 3) for other in others))
    assert await tokens(log) == [1, 2]


async def test_restarts_in_the_middle_of_many_appends_lose_and_repeat_nothing(
    redis_server: RedisServer, redis_client: aioredis.Redis
) -> None:
    enough = asyncio.Event()
    lengths = dict.fromkeys("abcdefgh", 0)

    async def session(name: str, choice: ChoiceLog) -> None:
        while not enough.is_set():
            await append(choice, lengths[name])
            lengths[name] += 1

    async def until_each_has(length: int) -> None:
        while min(lengths.values()) < length:  # noqa: ASYNC110 a writer that fails ends the group, and this with it
            await asyncio.sleep(0.005)

    async with gateway(redis_server) as log:
        async with asyncio.TaskGroup() as writers:
            for name in lengths:
                writers.create_task(session(name, log.new(name, RECORD).choice(0)))
            for number in range(3):
                await until_each_has(4 * (number + 1))
                await asyncio.to_thread(redis_server.restart)
            await until_each_has(16)
            enough.set()
        for name, length in lengths.items():
            assert [one.token_ids for one in await read(log, request_id=name)] == [(index,) for index in range(length)]


async def test_a_redis_that_lost_everything_gets_it_back_from_the_gateway(
    log: CommitLog, redis_client: aioredis.Redis
) -> None:
    """The record, and the choices that have ended, too."""
    request = log.new("r", RECORD)
    ended, runs, waits = request.choice(0), request.choice(1), request.choice(2)
    await append(ended, 1, 2, finish=1)
    await append(runs, 3)
    await redis_client.flushall()
    await runs.append(entry(1, 4, 5, extras=b"kept", epoch=7))
    assert await redis_client.get(f"{STEM}:record") == RECORD
    assert await read(log, 0) == (entry(0, 1, 2, finish=1),)
    assert await read(log, 1) == (entry(0, 3), entry(1, 4, 5, extras=b"kept", epoch=7))
    await append(runs, 6)
    await append(waits, 7)
    assert (await tokens(log, 1), await tokens(log, 2)) == ([3, 4, 5, 6], [7])
    assert await redis_client.ttl(f"{STEM}:0:log") > TTL_S - 30


async def test_a_redis_that_lost_the_last_entries_gets_them_back(redis_server: RedisServer, log: CommitLog) -> None:
    request = log.new("r", RECORD)
    choices = [request.choice(number) for number in range(4)]
    for choice in choices:
        await append(choice, 1)
    num_bytes = redis_server.num_bytes_written()
    for choice in choices:
        await append(choice, 2, 3)
        await append(choice, 4)
    await asyncio.to_thread(redis_server.lose_what_came_after, num_bytes)
    await asyncio.gather(*(append(choice, 5) for choice in choices))
    for number in range(4):
        assert [one.token_ids for one in await read(log, number)] == [(1,), (2, 3), (4,), (5,)]


async def test_what_was_lost_is_not_put_back_by_a_gateway_that_was_passed_over(
    redis_server: RedisServer, log: CommitLog, other_log: CommitLog
) -> None:
    old = log.new("r", RECORD).choice(0)
    await append(old, 1)
    _, [new] = await take_over(other_log, 0)
    num_bytes = redis_server.num_bytes_written()
    await append(new, 2)
    await asyncio.to_thread(redis_server.lose_what_came_after, num_bytes)
    with pytest.raises(CommitRefused):
        await append(old, 9)
    await append(new, 3)
    assert await tokens(log) == [1, 2, 3]


@pytest.mark.parametrize("written", [(9,), (8, 9)], ids=["less", "just as far"])
async def test_a_claim_that_redis_lost_still_wins_over_the_older_one(
    redis_server: RedisServer, log: CommitLog, other_log: CommitLog, written: tuple[int, ...]
) -> None:
    """The old gateway writes once more before the new one has said a word: the new one's memory is what stays.

    Nothing is appended behind the old one's tokens, also where they are as many as the new one's that were lost.
    """
    old = log.new("r", RECORD).choice(0)
    await append(old, 1)
    num_bytes = redis_server.num_bytes_written()
    _, [new] = await take_over(other_log, 0)
    await append(new, 2, 3)
    await asyncio.to_thread(redis_server.lose_what_came_after, num_bytes)
    await append(old, *written)
    await append(new, 4)
    assert await tokens(log) == [1, 2, 3, 4]
    with pytest.raises(CommitRefused):
        await append(old, 10)


async def test_of_two_claims_for_one_term_the_one_that_redis_lost_ends(
    redis_server: RedisServer, log: CommitLog, other_log: CommitLog
) -> None:
    await append(log.new("r", RECORD).choice(0), 1)
    num_bytes = redis_server.num_bytes_written()
    _, [lost] = await take_over(log, 0)
    await asyncio.to_thread(redis_server.lose_what_came_after, num_bytes)
    _, [kept] = await take_over(other_log, 0)
    assert lost.term == kept.term == 1
    await append(kept, 2)
    with pytest.raises(CommitRefused):
        await append(lost, 9)
    assert await tokens(log) == [1, 2]


async def test_what_is_put_back_late_does_not_undo_a_claim(log: CommitLog, other_log: CommitLog) -> None:
    """The old gateway had lost a part, and sent its copy just before the new one claimed the request."""
    request = log.new("r", RECORD)
    await append(request.choice(0), 1)
    keys, held = request.keys, (0, request.holder, TTL_S, RECORD, 0, 1, b"\x09\0\0\0", 0, 0, b"")
    _, [new] = await take_over(other_log, 0)
    await append(new, 2)
    named = (keys.log(0), keys.fence(0), keys.record)
    assert await log.run_script(scripts.RESTORE, named, lambda: held) == scripts.TAKEN_OVER
    assert await tokens(log) == [1, 2]


async def test_putting_back_never_takes_away_what_came_since(log: CommitLog) -> None:
    """A network may deliver the same message again much later."""
    request = log.new("r", RECORD)
    choice = request.choice(0)
    await append(choice, 1)
    keys, held = request.keys, (0, request.holder, TTL_S, RECORD, 0, 1, b"\x01\0\0\0", 0, 0, b"")
    await append(choice, 2)
    named = (keys.log(0), keys.fence(0), keys.record)
    assert await log.run_script(scripts.RESTORE, named, lambda: held) == scripts.APPENDED
    assert await tokens(log) == [1, 2]


async def test_a_redis_that_is_away_for_too_long_is_an_error_that_says_how_far_the_log_reaches(
    redis_server: RedisServer, log: CommitLog
) -> None:
    async with gateway(redis_server, patience_s=SHORT_PATIENCE_S) as hasty:
        choice = hasty.new("r", RECORD).choice(0)
        await append(choice, 1, 2, 3)
        await asyncio.to_thread(redis_server.stop)
        started = time.monotonic()
        try:
            with pytest.raises(Unavailable, match=r"has not answered for 3 s .*output tokens \[0, 3\) are committed"):
                await append(choice, 4)
            assert time.monotonic() - started < SHORT_PATIENCE_S + 30
        finally:
            await asyncio.to_thread(redis_server.start)
    assert await tokens(log) == [1, 2, 3]


async def test_closing_fails_what_still_waits(redis_server: RedisServer, redis_client: aioredis.Redis) -> None:
    async with gateway(redis_server) as log:
        waiting = [asyncio.create_task(append(log.new(str(number), RECORD).choice(0), 1)) for number in range(20)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), timeout=30.0)
    assert all(outcome is None or isinstance(outcome, Unavailable) for outcome in outcomes)


# ---- how long, and how much ----------------------------------------------------------------------------------------


async def _longest_ttl_s(redis_client: aioredis.Redis) -> int:
    return max([await redis_client.ttl(key) for key in await redis_client.keys(f"{STEM}:*")])


async def test_only_a_request_under_way_is_kept_for_long(
    redis_server: RedisServer, redis_client: aioredis.Redis
) -> None:
    """Before its first token and after its last one: an hour of everybody's requests filled Redis."""
    async with gateway(redis_server, ended_ttl_s=60) as log:
        request = log.new("r", RECORD)
        first, second = request.choice(0), request.choice(1)
        await request.begun()
        assert 0 < await _longest_ttl_s(redis_client) <= 60
        await append(first, 1)
        await append(second, 1, finish=1)
        assert await _longest_ttl_s(redis_client) > 60, "one of two goes on"
        await append(first, 2, finish=1)
        assert 0 < await _longest_ttl_s(redis_client) <= 60
        assert await tokens(log) == [1, 2], "and can be resumed meanwhile"


async def test_what_is_in_redis_counts_until_it_has_expired(
    redis_server: RedisServer, redis_client: aioredis.Redis
) -> None:
    now = [0.0]
    budget = LogBudget(max_record_bytes=10_000, total_bytes=80_000, clock=lambda: now[0])
    async with gateway(redis_server, ended_ttl_s=60, budget=budget) as log:
        choice = log.new("r", bytes(9000), "greedy").choice(0)
        await append(choice, *range(2000), finish=1)
        with pytest.raises(QuotaExceeded, match="hold 18088 bytes in the log, the most is 20000"):
            log.new("s", bytes(9000), "greedy")
        now[0] = 61.0
        assert await redis_client.memory_usage(f"{STEM}:record") > 9000
        log.new("s", bytes(9000), "greedy")
