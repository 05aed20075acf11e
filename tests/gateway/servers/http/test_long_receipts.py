"""Answers of megabytes are verified while streams of others flow: the event loop works for no longer than a moment."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from gateway_script import ScriptedService

from outrider.gateway.answers.read import read_answer
from outrider.gateway.request.served import ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, ValidRequest
from outrider.shared.messages import TokenLogprob

# seconds of processor time; between two turns of the event loop; what a stream of others may wait
MAX_TURN_S = 0.005
BODY = {"temperature": 1.0, "max_tokens": 3500, "receipt": True, "speculation": {"mode": "exact", "method": "ngram"}}
ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "top_logprobs": 20}),
    "completion": ("/v1/completions", {"prompt": "Hello", "logprobs": 20}),
    "stream": ("/v1/completions", {"prompt": "Hello", "logprobs": 20, "stream": True}),
}


class LongService(ScriptedService):
    """Says the same again without the work of a script."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, model=ServedModel("demo", 8192, 4096, ("ngram",), created=1_700_000_000))
        self.script.text, self.script.commit_len = "Paris is the capital of France. " * 500, 16
        self.said: list[GenerationUpdate] = []

    async def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        if not self.said:
            self.said = [update async for update in super().generate(request)]
        for update in self.said:
            await asyncio.sleep(0)
            yield update

    def _logprobs(
        self, token_ids: list[int], num_top: int | None, named: tuple[int, ...] = ()
    ) -> tuple[TokenLogprob, ...]:
        """Of 32 bits, as between the services."""
        tops = tuple(range(10, 10 + (num_top or 0)))
        return tuple(TokenLogprob(-one / 1024, 2, tops, tuple(-0.5 - top for top in tops)) for one in token_ids)


@pytest.fixture
def service(tokenizer: Tokenizer) -> Iterator[LongService]:
    gc.collect()
    gc.freeze()  # as a gateway does after its start: what the tests hold is scanned no more
    yield LongService(tokenizer)
    gc.unfreeze()


async def longest_turn(work: asyncio.Task[Any]) -> float:
    """Returns the most processor time that the event loop's thread took between two looks, a millisecond apart."""
    longest, before = 0.0, time.thread_time()
    while not work.done():
        await asyncio.sleep(0.001)
        now = time.thread_time()
        longest, before = max(longest, now - before), now
    return longest


async def sent(content: bytes) -> AsyncIterator[bytes]:
    """In pieces, as from a connection."""
    for start in range(0, len(content), 65536):
        await asyncio.sleep(0)
        yield content[start : start + 65536]


@pytest.mark.parametrize("name", ASKED)
async def test_comparing_a_long_answer_keeps_no_stream_waiting(http: httpx.AsyncClient, name: str) -> None:
    path, fields = ASKED[name]
    logprobs = {"logprobs": True} if "chat" in path else {}
    reply = await http.post(path, json={**BODY, **logprobs, **fields})
    assert reply.status_code == 200, reply.text[:300]
    content = json.dumps(read_answer(reply.text, "the answer")).encode()
    assert len(content) > 900_000
    turns = []
    for _ in range(3):
        headers = {"content-type": "application/json"}
        work = asyncio.create_task(http.post("/v1/receipts/verify", content=sent(content), headers=headers))
        turns.append(await longest_turn(work))
        assert work.result().json()["said"] == "confirmed: all 3500 tokens"
    assert min(turns) < MAX_TURN_S, turns
