"""Clients of the REST server: those that hang up, those that read slowly, the openai package, a real socket."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from asgi_call import AsgiCall
from gateway_script import Script, ScriptedService, until

from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.gateway.servers.http import http_answer
from outrider.gateway.servers.http.app import create_app
from outrider.shared.errors import Overloaded, VerifierLost

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = "Paris is the capital 漢字 👩‍👩‍👧 of France."
HI: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def without_ids(chunk: bytes) -> bytes:
    return re.sub(rb"cmpl-\w+|\"created\":\d+", b"", chunk)


# ---- clients that hang up ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
@pytest.mark.parametrize("endless", [False, True])
async def test_a_client_that_hangs_up_frees_everything(
    service: ScriptedService, stream: bool, prompt: Any, endless: bool
) -> None:
    """Both while tokens come and while nothing is sent at all."""
    service.script = Script(endless=endless, delay_s=0.0 if endless else 0.2)
    app = create_app(service)
    call = AsgiCall(app, COMPLETIONS, {"prompt": prompt, "max_tokens": 60, "stream": stream})
    call.start()
    num_prompts = 1 if prompt == "x" else 3
    await until(lambda: service.num_open == num_prompts)
    await asyncio.sleep(0.05)
    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        assert (await client.get("/load")).json() == {"server_load": 1}
        call.hang_up()
        await until(lambda: service.num_open == 0)
        assert call.task is not None
        await until(call.task.done)
        assert call.task.exception() is None
        assert (await client.get("/load")).json() == {"server_load": 0}


async def test_a_stream_sends_each_commit_when_it_comes(service: ScriptedService) -> None:
    service.script = Script(endless=True, commit_len=1)
    call = AsgiCall(create_app(service), COMPLETIONS, {"prompt": "x", "max_tokens": 60, "stream": True})
    call.start()
    first = await asyncio.wait_for(call.chunks.get(), 30)
    assert first is not None
    assert json.loads(first.decode().partition("data: ")[2])["choices"][0]["text"] == "Par"
    assert call.status == 200
    call.hang_up()
    assert call.task is not None
    await asyncio.wait_for(call.task, 30)


@pytest.mark.parametrize("serves", [False, True])
async def test_a_stream_says_that_it_waits_for_a_verifier(
    service: ScriptedService, serves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the events are what they are without the comments."""
    monkeypatch.setattr(http_answer, "WAIT_COMMENT_S", 0.05)
    view = service.fleet()
    fleet = {**view, "verifiers": [{"address": "v:1", "healthy": serves}]}
    monkeypatch.setattr(service, "fleet", lambda: fleet, raising=False)
    chunks: list[bytes] = []
    for delay_s in (0.0, 0.5):
        service.script = Script(text="Paris is", commit_len=1, delay_s=delay_s)
        call = AsgiCall(create_app(service), COMPLETIONS, {"prompt": "x", "max_tokens": 60, "stream": True})
        call.start()
        chunks.clear()
        while (chunk := await asyncio.wait_for(call.chunks.get(), 30)) is not None:
            chunks.append(chunk)
        if delay_s == 0.0:
            undisturbed = [without_ids(chunk) for chunk in chunks]
    comments = [chunk for chunk in chunks if chunk.startswith(b":")]
    assert set(comments) == (set() if serves else {b": waiting for a verifier\n"})
    assert [without_ids(chunk) for chunk in chunks if chunk not in comments] == undisturbed
    assert not chunks[0].startswith(b":")  # until the first token the answer may be an error


async def test_a_slow_reader_holds_the_generation_back(service: ScriptedService) -> None:
    """A server that stops taking data must stop the generator too, not fill memory."""
    service.script = Script(text="a " * 150, commit_len=1)
    num_pulled = 0
    plain_generate = service.generate

    async def counted(request: ValidRequest) -> AsyncIterator[GenerationUpdate]:
        nonlocal num_pulled
        async for update in plain_generate(request):
            num_pulled += 1
            yield update

    class Slow(AsgiCall):
        async def _send(self, message: Any) -> None:
            await super()._send(message)
            if self.chunks.qsize() >= 5:
                await asyncio.Event().wait()

    service.generate = counted  # type: ignore[method-assign,assignment]
    call = Slow(create_app(service), COMPLETIONS, {"prompt": ["x", "y"], "max_tokens": 200, "stream": True})
    call.start()
    await until(lambda: call.chunks.qsize() >= 5)
    await asyncio.sleep(0.3)  # it goes on now, if it does
    assert 5 <= num_pulled <= 80
    call.hang_up()
    assert call.task is not None
    await asyncio.wait_for(call.task, 30)


# ---- the openai package -----------------------------------------------------------------------------------------


@pytest.fixture
async def client(service: ScriptedService) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = httpx.ASGITransport(app=create_app(service))
    http_client: Any = httpx.AsyncClient(transport=transport, base_url="http://test")
    async with openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=http_client, max_retries=0
    ) as client:
        yield client


async def test_openai_completion(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="demo", prompt="Hello", max_tokens=60, logprobs=2, n=2)
    assert [choice.text for choice in answer.choices] == [TEXT, (TEXT * 2)[: len(answer.choices[1].text)]]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3
    assert [model.id async for model in client.models.list()] == ["demo"]


async def test_openai_chat(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    answer = await client.chat.completions.create(model="demo", messages=messages, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == TEXT
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode() == TEXT


async def test_openai_streams(client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    stream = await client.chat.completions.create(
        model="demo", messages=messages, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == TEXT
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 7 + 38
    legacy = await client.completions.create(model="demo", prompt="x", stream=True, max_tokens=60)
    assert "".join([chunk.choices[0].text async for chunk in legacy]) == TEXT


async def test_openai_reads_on_behind_a_wait_for_a_verifier(
    client: openai.AsyncOpenAI, service: ScriptedService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The package keeps the last event's id: an empty line behind it is another event to it, without data."""
    monkeypatch.setattr(http_answer, "WAIT_COMMENT_S", 0.05)
    fleet = {**service.fleet(), "verifiers": [{"address": "v:1", "healthy": False}]}
    monkeypatch.setattr(service, "fleet", lambda: fleet, raising=False)
    service.script = Script(text="Paris is", commit_len=1, delay_s=0.5)
    stream = await client.completions.create(model="demo", prompt="x", stream=True, max_tokens=60)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == "Paris is"


async def test_openai_sees_our_errors(client: openai.AsyncOpenAI, service: ScriptedService) -> None:
    with pytest.raises(openai.NotFoundError, match="'gpt' is not served"):
        await client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError) as raised:
        await client.completions.create(model="demo", prompt="x", temperature=-1)
    assert raised.value.param == "temperature"
    service.script = Script(error=Overloaded("full"))
    with pytest.raises(openai.RateLimitError):
        await client.completions.create(model="demo", prompt="x")
    service.script = Script(error=VerifierLost("the verifier is gone"), error_at=2)
    stream = await client.completions.create(model="demo", prompt="x", stream=True)
    with pytest.raises(openai.APIError, match="the verifier is gone"):
        _ = [chunk async for chunk in stream]


# ---- a real socket ----------------------------------------------------------------------------------------------


@pytest.fixture
async def address(service: ScriptedService) -> AsyncIterator[str]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(service), log_level="warning", ws="none", lifespan="off")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await task


async def test_a_closed_connection_frees_everything(service: ScriptedService, address: str) -> None:
    service.script = Script(endless=True)
    async with httpx.AsyncClient(base_url=address, timeout=30) as client:
        body = {**HI, "stream": True}
        async with client.stream("POST", CHAT, json=body) as response:
            lines = response.aiter_lines()
            assert (await anext(lines)).startswith("id: chatcmpl-")
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["delta"]["role"] == "assistant"
            assert service.num_open == 1
        await until(lambda: service.num_open == 0)
        whole = asyncio.create_task(client.post(CHAT, json=HI))
        await until(lambda: service.num_open == 1)
        whole.cancel()
        await until(lambda: service.num_open == 0)


async def test_an_oversized_body_is_answered(address: str) -> None:
    async with httpx.AsyncClient(base_url=address, timeout=30) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a" * 10_000_000})
        assert response.status_code == 413
        assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize(("num_chars", "on_the_loop"), [(100, True), (100_000, False)])
async def test_long_bodies_leave_the_event_loop(
    service: ScriptedService, monkeypatch: pytest.MonkeyPatch, num_chars: int, on_the_loop: bool
) -> None:
    """4 MB of text takes the tokenizer seconds; streams must not wait for it."""
    threads = []
    encode = Tokenizer.encode

    def watched(tokenizer: Tokenizer, text: str, add_special_tokens: bool = True) -> list[int]:
        threads.append(threading.current_thread())
        return encode(tokenizer, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", watched)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=create_app(service))) as client:
        response = await client.post("http://test/tokenize", json={"prompt": "a" * num_chars})
    assert response.status_code == 200
    assert [thread is threading.main_thread() for thread in threads] == [on_the_loop]
