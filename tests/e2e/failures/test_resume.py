"""A stream survives its gateway: SIGKILL in the middle, and any other gateway goes on with it, token for token."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc.aio
import httpx
import openai
import pytest
import redis.asyncio as aioredis
from e2e_gateways import HTTP_TIMEOUT_S, Fleet, Gateway, Told, read_events
from e2e_rest import speculation

from outrider.shared.api_keys import key_digest, key_line
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.storm

NUM_TOKENS = 320
# The gateway is killed, or the client hangs up, once so many tokens were read; the rest comes from another gateway.
CUT_AFTER = 30
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "class Queue:\n    def __init__(self):\n"
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": NUM_TOKENS,
    "temperature": 0.9,
    "seed": 99,
    "ignore_eos": True,
    "skip_special_tokens": False,
    "stream": True,
    **speculation("draft_model", 3, annotate=True),
}
EXTRAS: dict[str, dict[str, Any]] = {
    "plain": {},
    "everything": {
        "logprobs": 2,
        "echo": True,
        "return_token_ids": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    },
}


@pytest.fixture(scope="module")
def fleet(lasting_fleet: Fleet) -> Iterator[Fleet]:
    yield lasting_fleet
    lasting_fleet.close()


@pytest.fixture(scope="module")
def stays(fleet: Fleet) -> Gateway:
    """The gateway that takes over."""
    return fleet.gateway()


@pytest.fixture(scope="module")
async def http(stays: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with stays.client() as client:
        yield client


@pytest.fixture(scope="module")
async def calm(fleet: Fleet) -> AsyncIterator[httpx.AsyncClient]:
    """Of a gateway that nothing happens to."""
    async with httpx.AsyncClient(base_url=fleet.state.url, timeout=HTTP_TIMEOUT_S) as client:
        yield client


@pytest.fixture
async def redis(fleet: Fleet) -> AsyncIterator[aioredis.Redis]:
    connection = aioredis.Redis.from_url(fleet.redis.url)
    yield connection
    await connection.aclose()


def cut(told: Told) -> bool:
    return told.num_tokens() >= CUT_AFTER


def killing(gateway: Gateway) -> Callable[[Told], bool]:
    """Kills the gateway when enough was read, and reads on to see how the connection ends."""

    def check(told: Told) -> bool:
        if cut(told) and gateway.process.poll() is None:
            gateway.kill()
        return False

    return check


async def quiet(calm: httpx.AsyncClient, **fields: Any) -> Told:
    """The same request without an incident, and without drafts."""
    told = await read_events(calm, "POST", COMPLETIONS, body={**BODY, **fields, **speculation("off", annotate=True)})
    assert told.done
    return told


def in_parts(told: Told, num_choices: int = 1) -> list[tuple[str, list[int], str | None]]:
    return [(told.text(index), told.token_ids(index), told.finish_reason(index)) for index in range(num_choices)]


@pytest.mark.parametrize("how", ["POST without a body", "POST with the body", "GET"])
async def test_a_killed_gateways_stream_goes_on_at_another(
    fleet: Fleet, http: httpx.AsyncClient, calm: httpx.AsyncClient, how: str
) -> None:
    undisturbed = await quiet(calm)
    dies = fleet.gateway()
    async with dies.client() as client:
        first = await read_events(client, "POST", COMPLETIONS, body=BODY, until=killing(dies))
    assert first.broken
    assert not first.done
    assert CUT_AFTER <= first.num_tokens() < NUM_TOKENS
    method, path = ("GET", f"/v1/streams/{first.events[0]['id']}") if how == "GET" else ("POST", COMPLETIONS)
    body = BODY if how == "POST with the body" else None
    rest = await read_events(http, method, path, body=body, last_event_id=first.last_id)
    assert rest.done
    assert in_parts(first + rest) == in_parts(undisturbed)
    assert {event["id"] for event in (first + rest).events} == {first.events[0]["id"]}
    # The log has it all now: whoever asks again is told the very same events.
    again = await read_events(http, "GET", f"/v1/streams/{first.events[0]['id']}")
    assert again.blocks == (first + rest).blocks
    assert again.ids == (first + rest).ids


async def test_several_choices_of_several_prompts_go_on_each_from_its_own_place(
    fleet: Fleet, http: httpx.AsyncClient, calm: httpx.AsyncClient
) -> None:
    fields = {"prompt": [PROMPT, "import os\n"], "n": 2, "max_tokens": 200}
    undisturbed = await quiet(calm, **fields)
    dies = fleet.gateway()
    async with dies.client() as client:
        first = await read_events(client, "POST", COMPLETIONS, body={**BODY, **fields}, until=killing(dies))
    assert first.broken
    rest = await read_events(http, "POST", COMPLETIONS, last_event_id=first.last_id)
    assert rest.done
    assert in_parts(first + rest, 4) == in_parts(undisturbed, 4)
    assert len({tuple((first + rest).token_ids(index)) for index in range(4)}) == 4


async def test_a_request_whose_choices_never_began_is_begun(http: httpx.AsyncClient, redis: aioredis.Redis) -> None:
    """All that its gateway left is the record."""
    told = await read_events(http, "POST", COMPLETIONS, body={**BODY, "n": 2, "max_tokens": 20})
    stem = f"outrider:{{{told.events[0]['id']}}}"
    assert await redis.delete(*(f"{stem}:{choice}:{name}" for choice in range(2) for name in ("log", "fence"))) == 4
    again = await read_events(http, "GET", f"/v1/streams/{told.events[0]['id']}")
    assert again.done
    assert in_parts(again, 2) == in_parts(told, 2)


async def test_a_chat_goes_on(fleet: Fleet, http: httpx.AsyncClient) -> None:
    fields = {key: value for key, value in BODY.items() if key != "prompt"}
    body = {**fields, "messages": [{"role": "user", "content": "Write a queue."}], "logprobs": True, "max_tokens": 200}

    def text(told: Told) -> str:
        return "".join(choice["delta"].get("content", "") for event in told.events for choice in event["choices"])

    whole = await read_events(http, "POST", CHAT, body=body)
    dies = fleet.gateway()

    def enough(told: Told) -> bool:
        if len(told.ids) > 8 and dies.process.poll() is None:
            dies.kill()
        return False

    async with dies.client() as client:
        first = await read_events(client, "POST", CHAT, body=body, until=enough)
    rest = await read_events(http, "POST", CHAT, last_event_id=first.last_id)
    assert rest.done
    assert text(first + rest) == text(whole)
    roles = [choice["delta"].get("role") for event in (first + rest).events for choice in event["choices"]]
    assert roles == ["assistant"] + [None] * (len(roles) - 1)


@pytest.mark.parametrize("extras", EXTRAS.values(), ids=EXTRAS)
async def test_a_finished_stream_is_told_again_to_the_byte_from_every_event_on(
    http: httpx.AsyncClient, fleet: Fleet, extras: dict[str, Any]
) -> None:
    told = await read_events(http, "POST", COMPLETIONS, body={**BODY, "max_tokens": 48, **extras})
    stream = f"/v1/streams/{told.events[0]['id']}"
    async with httpx.AsyncClient(base_url=fleet.state.url, timeout=HTTP_TIMEOUT_S) as client:
        for place, last_id in enumerate(["", *told.ids]):
            rest = await read_events(client, "GET", stream, last_event_id=last_id)
            assert rest.done
            assert rest.blocks == told.blocks[place:]


async def test_a_stop_string_across_the_boundary_is_found(
    http: httpx.AsyncClient, calm: httpx.AsyncClient, redis: aioredis.Redis
) -> None:
    """The log is cut at every entry: what a gateway that dies there leaves behind."""
    full = await quiet(calm, max_tokens=60)
    text = full.text()
    # More tokens than a round has, two drafted ones and the target's own: some cut falls into it.
    token_texts = [one for event in full.events for one in event["choices"][0]["outrider"]["token_texts"]]
    stop = "".join(token_texts[30:36])
    body = {**BODY, "stop": [stop], "max_tokens": 60, **speculation("draft_model", 2, annotate=True)}
    told = await read_events(http, "POST", COMPLETIONS, body=body)
    assert told.text() == text[: text.index(stop)]
    assert told.finish_reason() == "stop"
    request_id = told.events[0]["id"]
    log = f"outrider:{{{request_id}}}:0:log"
    entries = await redis.xrange(log)
    spans = 0
    for kept in range(len(entries) - 5, len(entries)):
        await redis.delete(log)
        for entry_id, fields in entries[:kept]:
            await redis.xadd(log, fields, id=entry_id)
        logged_len = sum(int(fields[b"n"]) for _, fields in entries[:kept])
        # The last event that the client can have had from the gateway that died.
        last_id = max(
            (one for one in told.ids if int(one.rpartition(":")[2].rstrip("f")) <= logged_len),
            key=lambda one: int(one.rpartition(":")[2].rstrip("f")),
        )
        first = Told(ids=told.ids[: told.ids.index(last_id) + 1], blocks=told.blocks[: told.ids.index(last_id) + 1])
        spans += len(first.text()) < len(first.token_text())  # the beginning of the stop string is held back
        rest = await read_events(http, "GET", f"/v1/streams/{request_id}", last_event_id=last_id)
        assert rest.done
        assert (first + rest).text() == told.text()
        assert (first + rest).finish_reason() == "stop"
        assert (first + rest).events[-1]["choices"][0]["stop_reason"] == stop
    assert spans, "no cut fell into the stop string"


async def test_without_a_seed_no_token_is_lost_repeated_or_changed(
    fleet: Fleet, http: httpx.AsyncClient, redis: aioredis.Redis
) -> None:
    """The rest is another draw from the same law, so the log is what tells: one sequence, and what both were told."""
    body = {key: value for key, value in BODY.items() if key != "seed"}
    dies = fleet.gateway()
    async with dies.client() as client:
        first = await read_events(client, "POST", COMPLETIONS, body=body, until=killing(dies))
    rest = await read_events(http, "POST", COMPLETIONS, last_event_id=first.last_id)
    assert rest.done
    both = first + rest
    assert len(both.token_ids()) == NUM_TOKENS
    entries = await redis.xrange(f"outrider:{{{both.events[0]['id']}}}:0:log")
    logged = [
        int.from_bytes(fields[b"t"][at : at + 4], "little")
        for _, fields in entries
        for at in range(0, len(fields[b"t"]), 4)
    ]
    assert both.token_ids() == logged


async def test_who_resumes_a_running_stream_takes_it_over(
    fleet: Fleet, http: httpx.AsyncClient, calm: httpx.AsyncClient
) -> None:
    """The first client hears why its stream ends; nobody is told a token twice."""
    undisturbed = await quiet(calm)
    other = fleet.gateway()
    resumed: list[asyncio.Task[Told]] = []

    def take_over(told: Told) -> bool:
        if cut(told) and not resumed:
            asking = read_events(http, "POST", COMPLETIONS, last_event_id=told.last_id)
            resumed.append(asyncio.get_running_loop().create_task(asking))
        return False

    async with other.client() as client:
        first = await read_events(client, "POST", COMPLETIONS, body=BODY, until=take_over)
    assert first.error is not None
    assert (first.error["code"], first.error["type"]) == (409, "conflict_error")
    assert "another connection has taken over this request" in first.error["message"]
    rest = await resumed[0]
    assert rest.done
    [(text, token_ids, _)] = in_parts(undisturbed)
    assert token_ids[: len(first.token_ids())] == first.token_ids()
    assert text.endswith(rest.text())
    assert token_ids[len(token_ids) - len(rest.token_ids()) :] == rest.token_ids()


async def test_of_two_who_resume_at_once_the_last_one_wins(
    fleet: Fleet, http: httpx.AsyncClient, calm: httpx.AsyncClient
) -> None:
    undisturbed = await quiet(calm)
    other = fleet.gateway()
    async with other.client() as client:
        first = await read_events(client, "POST", COMPLETIONS, body=BODY, until=cut)
        both = await asyncio.gather(
            *(read_events(one, "POST", COMPLETIONS, last_event_id=first.last_id) for one in (http, client))
        )
    assert sorted(told.done for told in both) == [False, True]
    [loser] = [told for told in both if not told.done]
    [winner] = [told for told in both if told.done]
    assert loser.error is not None
    assert loser.error["code"] == 409
    assert in_parts(first + winner) == in_parts(undisturbed)
    tokens = (first + loser).token_ids()
    assert tokens == undisturbed.token_ids()[: len(tokens)]


async def test_unknown_ids_are_not_found(http: httpx.AsyncClient) -> None:
    for told in (
        await read_events(http, "GET", "/v1/streams/cmpl-nobody"),
        await read_events(http, "POST", COMPLETIONS, last_event_id="cmpl-nobody:3"),
        await read_events(http, "POST", CHAT, last_event_id="chatcmpl-nobody:3"),
    ):
        assert told.status == 404
        assert told.error is not None
        assert told.error["type"] == "not_found_error"


async def test_a_request_id_is_used_once(http: httpx.AsyncClient) -> None:
    body = {**BODY, "max_tokens": 4, "request_id": "mine"}
    assert (await read_events(http, "POST", COMPLETIONS, body=body)).done
    again = await read_events(http, "POST", COMPLETIONS, body=body)
    assert again.status == 409
    assert again.error is not None
    assert "already exists" in again.error["message"]


async def test_another_keys_request_cannot_be_told_from_one_that_never_was(fleet: Fleet, tmp_path: Path) -> None:
    keys = {"alice": "ok-alice", "bob": "ok-bob"}
    path = tmp_path / "keys"
    path.write_text("\n".join(key_line(name, key) for name, key in keys.items()))
    assert key_digest("ok-bob").hex() in path.read_text()
    guarded = fleet.gateway(api_keys_file=str(path))
    clients = {name: guarded.client(headers={"authorization": f"Bearer {key}"}) for name, key in keys.items()}
    async with clients["alice"] as alice, clients["bob"] as bob:
        first = await read_events(alice, "POST", COMPLETIONS, body=BODY, until=cut)
        request_id = first.events[0]["id"]
        told = await read_events(bob, "POST", COMPLETIONS, last_event_id=first.last_id)
        nobody = await read_events(bob, "POST", COMPLETIONS, last_event_id=first.last_id.replace(request_id, "cmpl-x"))
        assert told.status == nobody.status == 404
        assert told.error is not None
        assert nobody.error is not None
        assert {**told.error, "message": told.error["message"].replace(request_id, "cmpl-x")} == nobody.error
        rest = await read_events(alice, "POST", COMPLETIONS, last_event_id=first.last_id)
        assert rest.done
        assert len((first + rest).token_ids()) == NUM_TOKENS


async def test_the_openai_package_reads_streams_with_ids(stays: Gateway) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stays.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        stream = await client.completions.create(
            model="demo-target",
            prompt=PROMPT,
            max_tokens=8,
            stream=True,
            extra_body={"ignore_eos": True, "skip_special_tokens": False},
        )
        assert "".join([choice.text async for chunk in stream for choice in chunk.choices])


# ---- gRPC --------------------------------------------------------------------------------------------------------

REQUEST = gateway_pb2.GenerateRequest(
    prompt=PROMPT,
    sampling_params=common_pb2.SamplingParams(
        temperature=0.9, seed=99, max_tokens=NUM_TOKENS, ignore_eos=True, num_logprobs=1
    ),
    speculation=common_pb2.Speculation(method="draft_model", num_speculative_tokens=3),
)


def stub(gateway: Gateway) -> tuple[grpc.aio.Channel, Any]:
    channel = grpc.aio.insecure_channel(gateway.grpc_address)
    return channel, gateway_pb2_grpc.GatewayStub(channel)


def joined(replies: list[gateway_pb2.GenerateReply]) -> tuple[str, list[int], list[str]]:
    return (
        "".join(reply.text for reply in replies),
        [token_id for reply in replies for token_id in reply.token_ids],
        [text for reply in replies for text in reply.token_texts],
    )


async def test_grpc_goes_on_at_another_gateway(fleet: Fleet, stays: Gateway) -> None:
    channel, there = stub(stays)
    async with channel:
        whole = [reply async for reply in there.Generate(REQUEST)]
        dies = fleet.gateway()
        other_channel, first_stub = stub(dies)
        first: list[gateway_pb2.GenerateReply] = []

        async def read_until_it_dies() -> None:
            async for reply in first_stub.Generate(REQUEST):
                first.append(reply)
                if sum(len(one.token_ids) for one in first) >= CUT_AFTER and dies.process.poll() is None:
                    dies.kill()

        async with other_channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await read_until_it_dies()
        assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
        _, received, _ = joined(first)
        resume = gateway_pb2.ResumeRequest(request_id=first[0].request_id, base_len=len(received))
        rest = [reply async for reply in there.Resume(resume)]
        assert joined(first + rest) == joined(whole)
        assert rest[-1].usage == whole[-1].usage
        assert rest[-1].finish_reason == whole[-1].finish_reason
        # From any index on, be it within a commit; and past the last one, the end alone.
        token_ids, texts = received + joined(rest)[1], joined(whole)[2]
        for base_len in (0, 1, len(received) - 1, NUM_TOKENS - 1, NUM_TOKENS):
            resume.base_len = base_len
            replies = [reply async for reply in there.Resume(resume)]
            assert joined(replies)[1:] == (token_ids[base_len:], texts[base_len:])
            assert (replies[0].base_len, replies[-1].finish_reason) == (base_len, whole[-1].finish_reason)


async def test_one_choice_of_a_rest_answer_over_grpc(http: httpx.AsyncClient, stays: Gateway) -> None:
    told = await read_events(http, "POST", COMPLETIONS, body={**BODY, "n": 2, "max_tokens": 20})
    channel, there = stub(stays)
    async with channel:
        for choice in range(2):
            resume = gateway_pb2.ResumeRequest(request_id=told.events[0]["id"], base_len=5, choice=choice)
            replies = [reply async for reply in there.Resume(resume)]
            assert joined(replies)[1] == told.token_ids(choice)[5:]


async def test_grpc_refusals(stays: Gateway, http: httpx.AsyncClient) -> None:
    told = await read_events(http, "POST", COMPLETIONS, body={**BODY, "max_tokens": 4})
    request_id = told.events[0]["id"]
    channel, there = stub(stays)
    async with channel:
        for fields, code in (
            ({"request_id": "nobody"}, "NOT_FOUND"),
            ({"request_id": request_id, "choice": 1}, "INVALID_ARGUMENT"),
            ({"request_id": request_id, "base_len": 5}, "INVALID_ARGUMENT"),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await there.Resume(gateway_pb2.ResumeRequest(**fields)).read()
            assert raised.value.code() is grpc.StatusCode[code]
