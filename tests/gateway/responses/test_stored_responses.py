"""Responses in a real Redis: they are read, continued and deleted by their owner alone, for as long as they live."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import redis.asyncio as aioredis
from gateway_script import Script, ScriptedService
from responses_client import CALLS, TOOLS, blocks_of, openai_client, post

from outrider.gateway.admission.auth import Admission
from outrider.gateway.responses.store import ResponseStore
from outrider.shared.api_keys import KeyRing, key_line
from outrider.shared.errors import GatewayFull, QuotaExceeded, UnknownSession
from tests.redis_server import RedisServer


def prompt_of(service: ScriptedService) -> str:
    return service.tokenizer.decode(service.requests[-1].prompt_token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_response_is_there_when_the_client_reads_that_it_has_completed(
    service: ScriptedService, stream: bool
) -> None:
    service.script = Script(CALLS)
    async with openai_client(service) as client:
        body: dict[str, Any] = {"input": "Weather?", "tools": TOOLS, "metadata": {"a": "b"}}
        if stream:
            events = [event async for event in await client.responses.create(**body, stream=True)]
            assert events[-1].type == "response.completed"
            made = events[-1].response
        else:
            made = await client.responses.create(**body)
        assert made.store
        assert (await client.responses.retrieve(made.id)).to_dict() == made.to_dict()
        items = (await client.responses.input_items.list(made.id)).data
    assert [item.to_dict()["content"] for item in items] == [[{"type": "input_text", "text": "Weather?"}]]
    assert all(item.id for item in items)


async def test_a_response_goes_on_where_another_ended_without_its_instructions(service: ScriptedService) -> None:
    async with openai_client(service) as client:
        first = await client.responses.create(input="A?", instructions="Be brief.")
        second = await client.responses.create(input="B?", previous_response_id=first.id)
        await client.responses.delete(first.id)
        await client.responses.create(input="C?", previous_response_id=second.id, instructions="Be long.")
        items = (await client.responses.input_items.list(second.id, order="asc")).data
        page = await client.responses.input_items.list(second.id, order="asc", limit=1, after=items[0].id)
    assert second.previous_response_id == first.id
    assert prompt_of(service) == "system:Be long.;user:A?;assistant:Ok.;user:B?;assistant:Ok.;user:C?;"
    assert [item.to_dict()["role"] for item in items] == ["user", "assistant", "user"]
    assert items[1].id == first.output[0].id
    assert [item.id for item in page.data] == [items[1].id]


async def test_a_deleted_response_is_gone_even_if_its_stream_is_resumed(service: ScriptedService) -> None:
    streamed = await post(service, stream=True)
    async with openai_client(service) as client:
        await client.responses.retrieve("resp_r")
        await client.responses.delete("resp_r")
        event_id = blocks_of(streamed)[0].split("\n")[1].removeprefix("id: ")
        rest = await post(service, headers={"last-event-id": event_id})
        assert "event: response.completed" in rest.text
        for call in (client.responses.retrieve, client.responses.delete, client.responses.input_items.list):
            with pytest.raises(openai.NotFoundError, match="Response with id 'resp_r' not found"):
                await call("resp_r")
        with pytest.raises(openai.NotFoundError, match="previous_response_id: Response with id 'resp_r' not found"):
            await client.responses.create(input="B?", previous_response_id="resp_r")


async def test_another_keys_response_is_not_found(service: ScriptedService, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(key_line("ann", "or-ann") + "\n" + key_line("bob", "or-bob") + "\n")
    admission = Admission(ring=KeyRing(str(keys)))
    async with openai_client(service, "or-ann", admission) as ann, openai_client(service, "or-bob", admission) as bob:
        made = await ann.responses.create(input="A?")
        for call in (bob.responses.retrieve, bob.responses.delete, bob.responses.input_items.list):
            with pytest.raises(openai.NotFoundError):
                await call(made.id)
        with pytest.raises(openai.NotFoundError):
            await bob.responses.create(input="B?", previous_response_id=made.id)
        assert (await ann.responses.retrieve(made.id)).id == made.id


async def test_what_says_store_false_is_not_stored(service: ScriptedService) -> None:
    async with openai_client(service) as client:
        made = await client.responses.create(input="A?", store=False)
        assert made.store is False
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(made.id)


async def test_one_that_was_cut_at_its_limit_is_stored_and_one_that_broke_is_not(service: ScriptedService) -> None:
    service.script = Script("One two three four five.", ends_early=True)
    await post(service)
    async with openai_client(service) as client:
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve("resp_r")
        service.script = Script("One two three four five.")
        await post(service, max_output_tokens=3)
        assert (await client.responses.retrieve("resp_r")).status == "incomplete"


async def test_responses_expire(store: ResponseStore, redis_server: RedisServer) -> None:
    await store.put("o", "resp_1", b"{}", 0)
    async with aioredis.Redis.from_url(redis_server.url) as client:
        [key] = await client.keys("outrider:response:*")
        assert 50 < await client.ttl(key) <= 60
        await store.delete("o", "resp_1")
        assert 50 < await client.ttl(key) <= 60


async def test_no_id_reaches_into_another_owners_responses(store: ResponseStore) -> None:
    await store.put("a:b", "c", b"{}", 0)
    for owner, response_id in (("a", "b:c"), ("", "a:b:c"), ("a%3Ab", "c"), ("a:b:c", "")):
        with pytest.raises(UnknownSession):
            await store.get(owner, response_id)
    assert await store.get("a:b", "c") == b"{}"


async def test_stored_bytes_have_a_budget_and_what_has_begun_is_stored_anyway(store: ResponseStore) -> None:
    store.reserve("a", 3000)
    await store.put("a", "resp_1", b" " * 9000, num_reserved=3000)
    with pytest.raises(QuotaExceeded, match=r"stored responses: .*or send store: false"):
        store.reserve("a", 100)
    for number in range(6):
        store.reserve(f"b{number}", 3900)
    with pytest.raises(GatewayFull, match="or send store: false"):
        store.reserve("c", 3900)
