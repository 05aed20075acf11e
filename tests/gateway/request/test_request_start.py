"""Requests that are begun here and resumed there, over a real Redis: who may, from where, and who has to go."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import redis.asyncio as aioredis

from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared, Wanted
from outrider.gateway.request.event_cursor import EventCursor, Seen, parse_event_id
from outrider.gateway.request.record import RECORD_VERSION
from outrider.gateway.request.start import EPOCHS_PER_TERM, begin, resume
from outrider.gateway.request.types import ChoiceStart, ValidRequest
from outrider.shared.errors import (
    CommitRefused,
    InvalidRequest,
    OutriderError,
    Unavailable,
    UnknownModel,
    UnknownSession,
)
from outrider.shared.log.commit_log import CommitLog, LogEntry, RequestLog
from outrider.shared.sampling_params import SamplingParams
from outrider.v1 import log_pb2
from tests.redis_server import RedisServer

MODEL = "demo"
ID = "cmpl-1"


@pytest.fixture
async def log(redis_server: RedisServer, redis_client: aioredis.Redis) -> AsyncIterator[CommitLog]:
    commit_log = CommitLog.connect(redis_server.url, ttl_s=60)
    await commit_log.start()
    yield commit_log
    await commit_log.close()


@pytest.fixture
async def other_log(redis_server: RedisServer, redis_client: aioredis.Redis) -> AsyncIterator[CommitLog]:
    commit_log = CommitLog.connect(redis_server.url, ttl_s=60)
    await commit_log.start()
    yield commit_log
    await commit_log.close()


def prepared(*, num_prompts: int = 1, n: int = 1, seed: int | None = 5, owner: str = "") -> Prepared:
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20)
    requests = tuple(
        ValidRequest(f"{ID}-{place}", (place, 7), params, n=n, owner=owner) for place in range(num_prompts)
    )
    return Prepared(requests, AnswerOptions(ID, 0, MODEL, chat=False, stream=True))


def starts(answer: Prepared) -> list[ChoiceStart]:
    return [start for request in answer.requests for start in request.starts]


def wanted(seen: dict[int, Seen] | None = None, *, owner: str = "", **fields: Any) -> Wanted:
    return Wanted(fields.pop("request_id", ID), owner, seen or {}, **fields)


def entry(base_len: int, *token_ids: int, finish: int = 0) -> LogEntry:
    return LogEntry(base_len, token_ids, finish)


async def refusal(log: CommitLog, asked: Wanted, kind: type[OutriderError]) -> str:
    with pytest.raises(kind) as raised:
        await resume(log, asked, MODEL)
    assert type(raised.value) is kind
    return raised.value.message


async def test_a_request_begins_with_every_choice_at_its_beginning(log: CommitLog) -> None:
    answer = begin(log, AnswerKind.COMPLETION, prepared(num_prompts=2, n=2))
    rows = starts(answer)
    assert [(row.choice_index, row.epoch, row.logged, row.seen_len) for row in rows] == [
        (0, 0, (), 0),
        (1, 0, (), 0),
        (0, 0, (), 0),
        (1, 0, (), 0),
    ]
    assert len({row.stream_key for row in rows}) == 4
    for row in rows:
        await row.log.append(entry(0, 1))


async def test_another_gateway_goes_on_where_this_one_was(log: CommitLog, other_log: CommitLog) -> None:
    """One choice has ended, one is under way, one has never begun."""
    before = starts(begin(log, AnswerKind.COMPLETION, prepared(n=3), "bfloat16/cpu/cpu/tp1/aa"))
    ended, running, waiting = before
    await ended.log.append(entry(0, 1, 2, finish=2))
    await running.log.append(entry(0, 3))
    answer = await resume(other_log, wanted({0: Seen(2, True), 1: Seen(1)}), MODEL)
    assert answer.options == prepared().options
    after = starts(answer)
    assert [row.stream_key for row in after] == [row.stream_key for row in before]
    assert {row.numerics for row in (*before, *after)} == {"bfloat16/cpu/cpu/tp1/aa"}
    assert [(row.logged, row.epoch, row.seen_len) for row in after] == [
        ((entry(0, 1, 2, finish=2),), EPOCHS_PER_TERM, 2),
        ((entry(0, 3),), EPOCHS_PER_TERM, 1),
        ((), EPOCHS_PER_TERM, 0),
    ]
    for row in (running, waiting):
        with pytest.raises(CommitRefused):
            await row.log.append(entry(1 if row is running else 0, 9))
    await after[1].log.append(entry(1, 4))
    await after[2].log.append(entry(0, 5))
    third = starts(await resume(log, wanted(), MODEL))
    assert [row.epoch for row in third] == [2 * EPOCHS_PER_TERM] * 3
    assert third[1].logged == (entry(0, 3), entry(1, 4))


async def test_what_is_written_at_the_last_moment_counts(
    log: CommitLog, other_log: CommitLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the new gateway's look at the log and its claim."""
    first, second, third = starts(begin(log, AnswerKind.COMPLETION, prepared(n=3)))
    await third.log.append(entry(0, 9))
    claim = RequestLog.claim

    async def late(request_log: RequestLog, choices: Sequence[int]) -> dict[int, int]:
        await first.log.append(entry(0, 1))
        await second.log.append(entry(0, 2, finish=1))
        return await claim(request_log, choices)

    monkeypatch.setattr(RequestLog, "claim", late)
    after = starts(await resume(other_log, wanted(), MODEL))
    assert [row.logged for row in after] == [(entry(0, 1),), (entry(0, 2, finish=1),), (entry(0, 9),)]
    await after[0].log.append(entry(1, 3))


async def test_one_choice_alone_leaves_the_others_to_their_gateway(log: CommitLog, other_log: CommitLog) -> None:
    before = starts(begin(log, AnswerKind.COMPLETION, prepared(num_prompts=2, n=2)))
    for row in before:
        await row.log.append(entry(0, 1))
    answer = await resume(other_log, wanted({3: Seen(1)}, choice=3), MODEL)
    assert [len(request.starts) for request in answer.requests] == [0, 1]
    [start] = starts(answer)
    assert (start.choice_index, start.seen_len, start.stream_key) == (1, 1, before[3].stream_key)
    for row in before[:3]:
        await row.log.append(entry(1, 2))
    with pytest.raises(CommitRefused):
        await before[3].log.append(entry(1, 2))


async def test_a_request_that_has_ended_is_nobodys_loss(log: CommitLog, other_log: CommitLog) -> None:
    """Two may read it at the same time."""
    [row] = starts(begin(log, AnswerKind.COMPLETION, prepared()))
    await row.log.append(entry(0, 1, finish=1))
    for _ in range(2):
        [again] = starts(await resume(other_log, wanted(), MODEL))
        assert (again.logged, again.epoch) == ((entry(0, 1, finish=1),), 0)


async def test_somebody_elses_request_looks_like_one_that_never_was(log: CommitLog) -> None:
    for owner in ("alice", ""):
        [row] = starts(begin(log, AnswerKind.COMPLETION, prepared(owner=owner)))
        await row.log.append(entry(0, 1))  # the same id for two owners: two requests
    never = await refusal(log, wanted(request_id="cmpl-9"), UnknownSession)
    for owner in ("bob", "alic", "alice cmpl-1"):
        message = await refusal(log, wanted(owner=owner), UnknownSession)
        assert message.replace(ID, "cmpl-9") == never
    assert await refusal(log, wanted(request_id="alice cmpl-1"), UnknownSession)
    assert len(starts(await resume(log, wanted(owner="alice"), MODEL))) == 1
    assert len(starts(await resume(log, wanted(), MODEL))) == 1


async def test_an_answer_of_another_kind_is_not_found_and_not_disturbed(log: CommitLog) -> None:
    [row] = starts(begin(log, AnswerKind.CHAT, prepared()))
    await row.log.append(entry(0, 1))
    assert "is known here" in await refusal(log, wanted(kind=AnswerKind.COMPLETION), UnknownSession)
    await row.log.append(entry(1, 2))
    assert len(starts(await resume(log, wanted(kind=AnswerKind.CHAT), MODEL))) == 1


async def test_an_expired_request_is_not_found(log: CommitLog, redis_client: aioredis.Redis) -> None:
    [row] = starts(begin(log, AnswerKind.COMPLETION, prepared()))
    await row.log.append(entry(0, 1))
    await redis_client.flushall()
    assert "may have expired" in await refusal(log, wanted(), UnknownSession)


async def test_what_cannot_have_been_seen_is_refused_before_anybody_is_passed_over(log: CommitLog) -> None:
    first, second = starts(begin(log, AnswerKind.COMPLETION, prepared(n=2)))
    await first.log.append(entry(0, 1, 2, finish=1))
    await second.log.append(entry(0, 1))
    for seen in ({0: Seen(3)}, {0: Seen(3, True)}, {1: Seen(21)}, {2: Seen(0)}):
        await refusal(log, wanted(seen), InvalidRequest)
    for choice in (-1, 2):
        assert "between 0 and 1" in await refusal(log, wanted(choice=choice), InvalidRequest)
    with pytest.raises(UnknownModel, match="begun with model 'demo', here is 'other'"):
        await resume(log, wanted(), "other")
    await second.log.append(entry(1, 2))


@pytest.mark.parametrize("seed", [5, None])
async def test_tokens_that_were_seen_but_lost(log: CommitLog, seed: int | None) -> None:
    """With a seed they come out the same once more; without one nobody may pretend that they do."""
    [row] = starts(begin(log, AnswerKind.COMPLETION, prepared(seed=seed)))
    await row.log.append(entry(0, 1, 2))
    for seen in (Seen(4), Seen(2, True)):
        if seed is None:
            assert "was lost with Redis" in await refusal(log, wanted({0: seen}), CommitRefused)
        else:
            [again] = starts(await resume(log, wanted({0: seen}), MODEL))
            assert (again.logged, again.seen_len) == ((entry(0, 1, 2),), seen.num_tokens)
    if seed is None:
        await row.log.append(entry(2, 3))


@pytest.mark.parametrize("seed", [5, None])
async def test_tokens_that_were_seen_then_lost_and_drawn_again(log: CommitLog, seed: int | None) -> None:
    """The log reaches as far as the client once more, but without a seed with other tokens, of a later session."""
    [row] = starts(begin(log, AnswerKind.COMPLETION, prepared(seed=seed)))
    await row.log.append(entry(0, 1, 2))
    [second] = starts(await resume(log, wanted(), MODEL))
    session = 7
    await second.log.append(LogEntry(2, (8, 9), 0, session))
    for kept in (Seen(2), Seen(4, epoch=session), Seen(3, epoch=session), Seen(4, epoch=None)):
        [again] = starts(await resume(log, wanted({0: kept}), MODEL))
        assert again.seen_len == kept.num_tokens
    for lost in (Seen(3), Seen(4), Seen(1, epoch=session)):
        if seed is None:
            assert "drawn again" in await refusal(log, wanted({0: lost}), CommitRefused)
        else:
            await resume(log, wanted({0: lost}), MODEL)


@pytest.mark.parametrize("begins_again", [True, False], ids=["record-lost", "claim-lost"])
async def test_a_term_that_is_given_out_twice_makes_two_sessions(
    redis_server: RedisServer, log: CommitLog, other_log: CommitLog, begins_again: bool
) -> None:
    """A Redis that loses power forgets the last claims, or that the request was begun at all."""
    num_bytes = redis_server.num_bytes_written()
    [first] = starts(begin(log, AnswerKind.COMPLETION, prepared(seed=None)))
    await first.log.append(LogEntry(0, (1,), 0, first.log_epoch))
    if not begins_again:
        num_bytes = redis_server.num_bytes_written()
        [first] = starts(await resume(log, wanted(), MODEL))
        await first.log.append(LogEntry(1, (8,), 0, first.log_epoch))
    seen = Seen(1 if begins_again else 2, epoch=first.log_epoch)
    await asyncio.to_thread(redis_server.lose_what_came_after, num_bytes)
    if begins_again:
        [second] = starts(begin(other_log, AnswerKind.COMPLETION, prepared(seed=None)))
    else:
        [second] = starts(await resume(other_log, wanted(), MODEL))
    assert second.epoch == first.epoch
    await second.log.append(LogEntry(seen.num_tokens - 1, (9,), 0, second.log_epoch))
    assert "drawn again" in await refusal(log, wanted({0: seen}), CommitRefused)
    assert starts(await resume(log, wanted({0: dataclasses.replace(seen, epoch=second.log_epoch)}), MODEL))


async def test_what_is_lost_at_the_last_moment_counts(
    log: CommitLog, other_log: CommitLog, redis_client: aioredis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the new gateway's look at the log and its claim."""
    [row] = starts(begin(log, AnswerKind.COMPLETION, prepared(seed=None)))
    await row.log.append(entry(0, 1))
    claim = RequestLog.claim

    async def late(request_log: RequestLog, choices: Sequence[int]) -> dict[int, int]:
        await redis_client.delete(request_log.keys.log(0))
        return await claim(request_log, choices)

    monkeypatch.setattr(RequestLog, "claim", late)
    assert "was lost with Redis" in await refusal(other_log, wanted({0: Seen(1)}), CommitRefused)


async def test_epochs_in_the_log_fit_into_event_ids(log: CommitLog) -> None:
    """Also in those that an older gateway reads."""
    drawn = [starts(begin(log, AnswerKind.COMPLETION, prepared(seed=None)))[0].log_epoch for _ in range(50)]
    assert len(set(drawn)) == 50
    for log_epoch in (*drawn, 1 << 40):
        cursor = EventCursor((Seen(3, epoch=log_epoch + 99 * EPOCHS_PER_TERM),))
        assert parse_event_id(f"{ID}:{cursor}") == (ID, cursor)
        assert len(str(cursor)) <= len("3s") + 15
    assert starts(begin(log, AnswerKind.COMPLETION, prepared(seed=5)))[0].log_epoch == 0


async def test_a_record_of_another_version_is_refused(log: CommitLog, redis_client: aioredis.Redis) -> None:
    [row] = starts(begin(log, AnswerKind.COMPLETION, prepared()))
    await row.log.append(entry(0, 1))
    key = f"outrider:{{{ID}}}:record"
    message = log_pb2.SessionRecord.FromString(await redis_client.get(key))
    message.version = RECORD_VERSION + 1
    await redis_client.set(key, message.SerializeToString())
    assert "another version of the gateway" in await refusal(log, wanted(), Unavailable)


async def test_a_second_request_of_the_same_id_is_refused_though_it_asks_for_the_same(
    log: CommitLog, other_log: CommitLog
) -> None:
    same = prepared()
    [first] = starts(begin(log, AnswerKind.COMPLETION, same))
    await first.log.append(entry(0, 1))
    [second] = starts(begin(other_log, AnswerKind.COMPLETION, dataclasses.replace(same)))
    with pytest.raises(CommitRefused, match="already exists"):
        await second.log.append(entry(0, 1))
    await first.log.append(entry(1, 2))
