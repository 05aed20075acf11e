"""Responses in a real Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import redis.asyncio as aioredis
from gateway_script import ScriptedService
from hermes_service import service_of
from responses_client import CountedRedis
from tool_tokenizers import tokenizer_of
from tool_transcripts import HERMES

from outrider.gateway.responses.store import ResponseStore
from outrider.shared.log.log_budget import LogBudget
from tests.redis_server import RedisServer

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"


@pytest.fixture
async def redis(redis_server: RedisServer) -> AsyncIterator[CountedRedis]:
    redis = CountedRedis.connect(redis_server.url, patience_s=15, scripts=())
    await redis.start()
    async with aioredis.Redis.from_url(redis_server.url) as client:
        await client.flushall()
    yield redis
    await redis.close()


@pytest.fixture
def store(redis: CountedRedis) -> ResponseStore:
    return ResponseStore(redis, ttl_s=60, budget=LogBudget(max_record_bytes=4000, total_bytes=40_000))


@pytest.fixture
def service(store: ResponseStore) -> ScriptedService:
    service = service_of("Ok.")
    service.tokenizer = tokenizer_of(HERMES, TEMPLATE)
    service.response_store = store
    return service
