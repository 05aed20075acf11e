"""Long bodies are worked on a few at a time, and counted while they are in memory; short ones do not notice."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest
from gateway_script import ScriptedService
from gateway_servers import ALICE, BOB, key_file, open_servers

from outrider.gateway.admission.body_budget import ANSWER_RATIO, INLINE_BYTES, BodyBudget, Held
from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import GatewayFull, QuotaExceeded

LONG = {"prompt": "word " * 20_000}


class SlowTokenizer:
    """The real one, whose long texts wait for `go`, and which counts how many do at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self.go = threading.Event()
        self.num_now = self.most = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
        if len(text) < INLINE_BYTES:
            return self._tokenizer.encode(text, *args, **kwargs)
        with self._lock:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
        assert self.go.wait(60)
        with self._lock:
            self.num_now -= 1
        return self._tokenizer.encode(text, *args, **kwargs)


async def _until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.01)


async def test_twelve_long_texts_are_tokenized_two_at_a_time(service: ScriptedService) -> None:
    """All at once they took 2.6 GB."""
    slow = SlowTokenizer(service.tokenizer)
    service.tokenizer = slow  # type: ignore[assignment]
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers,
        httpx.AsyncClient(base_url=servers.url, timeout=60) as http,
    ):
        bodies = servers.admission.bodies
        long = [asyncio.create_task(http.post("/tokenize", json=LONG)) for _ in range(12)]
        await _until(lambda: slow.num_now == 2 and bodies.num_bytes > 12 * 60_000)
        short = await http.post("/v1/completions", json={"prompt": "Hello", "max_tokens": 5})
        assert short.status_code == 200
        slow.go.set()
        assert [(await answer).status_code for answer in long] == [200] * 12
        assert slow.most == 2
        await _until(lambda: bodies.num_bytes == 0)


async def test_one_keys_long_bodies_leave_room_for_anothers(service: ScriptedService, tmp_path: Any) -> None:
    slow = SlowTokenizer(service.tokenizer)
    service.tokenizer = slow  # type: ignore[assignment]
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(tmp_path))
    async with open_servers(service, config) as servers, httpx.AsyncClient(base_url=servers.url, timeout=60) as http:
        servers.admission.bodies._max_bytes = 7_000_000  # room for two of ALICE's with their answers, and BOB's

        def post(key: str) -> asyncio.Task[httpx.Response]:
            return asyncio.create_task(http.post("/tokenize", json=LONG, headers={"authorization": f"Bearer {key}"}))

        first = [post(ALICE), post(ALICE)]
        await _until(lambda: slow.num_now == 2)
        refused = await post(ALICE)
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "2")
        other = post(BOB)
        await _until(lambda: servers.admission.bodies.num_bytes > 4_000_000)
        slow.go.set()
        assert [(await answer).status_code for answer in (*first, other)] == [200] * 3


async def test_an_answer_has_room_before_it_is_worked_out(service: ScriptedService) -> None:
    """Those of twelve texts of 4 MB were all held at once."""
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers,
        httpx.AsyncClient(base_url=servers.url, timeout=60) as http,
    ):
        servers.admission.bodies._max_bytes = 1_000_000
        body = {"prompt": "a " * 50_000, "return_token_strs": True}
        refused = await http.post("/tokenize", json=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "2")
        servers.admission.bodies._max_bytes = (1 + ANSWER_RATIO) * 100_100
        answer = await http.post("/tokenize", json=body)
        assert answer.status_code == 200
        assert len(answer.content) < ANSWER_RATIO * len(answer.request.content)
        await _until(lambda: servers.admission.bodies.num_bytes == 0)


async def test_a_turn_is_given_back_when_its_thread_is_done_not_when_its_caller_gives_up() -> None:
    budget, go = BodyBudget(), threading.Event()
    waiting = [asyncio.create_task(budget.on_thread(lambda: go.wait(60), 1)) for _ in range(2)]
    await asyncio.sleep(0)
    third = asyncio.create_task(budget.on_thread(lambda: "done", 1))
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    await asyncio.sleep(0)
    assert budget._turns.locked()
    go.set()
    assert await third == "done"


def test_only_what_is_beyond_a_short_body_counts() -> None:
    budget = BodyBudget(100_000)
    many = [Held(budget, "greedy") for _ in range(100)]
    for held in many:
        held.add_body(INLINE_BYTES)
    assert budget.num_bytes == 0
    many[0].add_body(50_000)
    with pytest.raises(QuotaExceeded):
        many[1].add_body(1)
    others = Held(budget)
    others.add_body(INLINE_BYTES + 50_000)
    with pytest.raises(GatewayFull):
        others.add_body(1)
    for held in many:
        held.close()
    assert budget.num_bytes == 50_000


async def test_large_bodies_leave_others_a_thread() -> None:
    budget, go = BodyBudget(), threading.Event()
    large = [asyncio.create_task(budget.on_thread(lambda: go.wait(60), 4 * 2**20)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await budget.on_thread(lambda: "done", 100_000) == "done"
    go.set()
    assert await asyncio.gather(*large) == [True] * 3


async def test_many_short_texts_are_tokenized_on_a_thread(service: ScriptedService) -> None:
    """1,024 bad words took 0.1 s of the loop that serves every stream."""
    threads: set[str] = set()

    class Watched(SlowTokenizer):
        def encode(self, text: str, *args: Any, **kwargs: Any) -> list[int]:
            if text.strip() == "never":
                threads.add(threading.current_thread().name)
            return self._tokenizer.encode(text, *args, **kwargs)

    service.tokenizer = Watched(service.tokenizer)  # type: ignore[assignment]
    body = {"prompt": "Hello", "max_tokens": 5, "bad_words": ["never"] * 100}
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers,
        httpx.AsyncClient(base_url=servers.url) as http,
    ):
        assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert threads
    assert threading.current_thread().name not in threads


async def test_long_lists_are_written_as_json_has_them(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    text = 'Ä "quote" word ' * 5_000
    answer = (await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) > 8192
    assert answer["token_strs"] == [tokenizer.token_string(token_id) for token_id in answer["tokens"]]
