"""The worker's part of a migration, over real gateways, a verifier and Redis: Dynamo is not needed for it.

A worker that dies is one whose stream is abandoned; another is given what Dynamo's frontend gives it: the prompt, what
it has of the output behind that, and so much less to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

import pytest

from outrider.plugins.dynamo.gateways import Gateways
from outrider.plugins.dynamo.request import Chunks, completion
from outrider.shared.errors import CommitRefused, OutriderError
from tests.plugins.dynamo.dynamo_fleet import PacedFleet

pytestmark = [pytest.mark.timeout(900)]

CONTEXT_LENGTH = 2048
PROMPT = [313, 2746, 906]
NUM_TOKENS = MIN_TOKENS = 90
SEEDED = {"temperature": 1.0, "seed": 7}
KINDS: dict[str, dict[str, Any]] = {
    "seeded": SEEDED,
    "fresh": {"temperature": 1.0},
    "greedy": {"temperature": 0.0},
    "penalties": {**SEEDED, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "grammar": {**SEEDED, "guided_decoding": {"regex": "[a-z ]+"}},
}


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PacedFleet]:
    async with PacedFleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


class Worker:
    """One of Dynamo's, as far as a request goes."""

    def __init__(self, *urls: str) -> None:
        self.gateways = Gateways(urls)

    async def chunks(
        self, dynamo_id: str, token_ids: list[int], num_left: int, sampling: dict[str, Any]
    ) -> AsyncIterator[dict[str, Any]]:
        request = {
            "token_ids": token_ids,
            "sampling_options": sampling,
            "stop_conditions": {"max_tokens": num_left, "min_tokens": MIN_TOKENS, "ignore_eos": True},
        }
        body = completion(request, dynamo_id, "demo-target", CONTEXT_LENGTH)
        made = Chunks(body["prompt"])
        async with aclosing(self.gateways.events(body)) as events:
            async for event in events:
                for chunk in made.of(event):
                    yield chunk

    async def tokens(self, *request: Any, most_chunks: int = 10_000) -> list[int]:
        """Of the first chunks; then the worker leaves the stream."""
        token_ids: list[int] = []
        num_chunks = 0
        async with aclosing(self.chunks(*request)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                if num_chunks == most_chunks:
                    break
                num_chunks += 1
                token_ids += chunk["token_ids"]
        return token_ids


Make = Callable[..., Worker]


@pytest.fixture
async def worker() -> AsyncIterator[Make]:
    """Makes workers, each with its gateways' URLs."""
    made: list[Worker] = []

    def make(*urls: str) -> Worker:
        made.append(Worker(*urls))
        return made[-1]

    yield make
    for one in made:
        await one.gateways.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_another_worker_goes_on_from_the_log(fleet: PacedFleet, worker: Make, kind: str) -> None:
    first, second = worker(fleet.urls[0]), worker(fleet.urls[1])
    known = await first.tokens(kind, PROMPT, NUM_TOKENS, KINDS[kind], most_chunks=4)
    assert 4 <= len(known) < NUM_TOKENS
    rest = await second.tokens(kind, PROMPT + known, NUM_TOKENS - len(known), KINDS[kind])
    assert len(known + rest) == NUM_TOKENS
    # The whole of it, as the log has it, and as a request of its own has it where the output is fixed.
    assert await first.tokens(kind, PROMPT, NUM_TOKENS, KINDS[kind]) == known + rest
    if kind != "fresh":
        assert await first.tokens(f"{kind}-again", PROMPT, NUM_TOKENS, KINDS[kind]) == known + rest


async def test_a_worker_that_died_before_its_first_chunk(fleet: PacedFleet, worker: Make) -> None:
    first, second = worker(fleet.urls[0]), worker(fleet.urls[1])
    assert await first.tokens("early", PROMPT, NUM_TOKENS, SEEDED, most_chunks=0) == []
    whole = await second.tokens("early", PROMPT, NUM_TOKENS, SEEDED)
    assert whole == await first.tokens("seeded-by-itself", PROMPT, NUM_TOKENS, SEEDED)


async def test_a_gateway_dies_in_mid_stream(fleet: PacedFleet, worker: Make) -> None:
    whole = await worker(*fleet.urls).tokens("undisturbed", PROMPT, NUM_TOKENS, SEEDED)
    for number, victim in enumerate(fleet.of_kind("gateway")):
        token_ids: list[int] = []
        async for chunk in worker(*fleet.urls[number:], *fleet.urls[:number]).chunks(
            f"gateway-{number}", PROMPT, NUM_TOKENS, SEEDED
        ):
            token_ids += chunk["token_ids"]
            if victim.process is not None and len(token_ids) > 8:
                victim.kill()
        victim.start()
        await fleet.wait_serving(victim)
        assert token_ids == whole


async def test_another_request_of_the_same_id_sees_nothing_and_stops_nothing(fleet: PacedFleet, worker: Make) -> None:
    """Its prompt begins alike, and its parameters are the same: all that an id is made of."""
    mine, other = worker(fleet.urls[0]), worker(fleet.urls[1])
    whole = await mine.tokens("mine-alone", PROMPT, NUM_TOKENS, SEEDED)
    token_ids: list[int] = []
    num_refused = 0
    async for chunk in mine.chunks("mine", PROMPT, NUM_TOKENS, SEEDED):
        token_ids += chunk["token_ids"]
        if len(token_ids) > 8 and num_refused < 2:
            num_refused += 1
            with pytest.raises(CommitRefused, match="another request"):
                await other.tokens("mine", [*PROMPT[:2], 5], NUM_TOKENS, SEEDED)
    assert num_refused == 2
    assert token_ids == whole


async def test_of_two_workers_with_a_request_the_later_one_has_it(fleet: PacedFleet, worker: Make) -> None:
    """Dynamo takes a worker for dead that is not: its stream ends, and the other's goes on."""
    early, late = worker(fleet.urls[0]), worker(fleet.urls[1])
    whole = await early.tokens("two-alone", PROMPT, NUM_TOKENS, SEEDED)
    rests: list[asyncio.Task[list[int]]] = []
    had: list[int] = []

    async def stream() -> None:
        known: list[int] = []
        async for chunk in early.chunks("two", PROMPT, NUM_TOKENS, SEEDED):
            known += chunk["token_ids"]
            if not rests:
                had.extend(known)
                rests.append(asyncio.create_task(late.tokens("two", PROMPT + known, NUM_TOKENS - len(known), SEEDED)))

    with pytest.raises(OutriderError) as ended:
        await stream()
    assert ended.value.http_status == 409
    assert had + await rests[0] == whole


async def test_the_fleet_s_capacity(fleet: PacedFleet, worker: Make) -> None:
    gateways = worker(*fleet.urls).gateways
    capacity, [verifier] = await gateways.capacity(), fleet.of_kind("verifier")
    info = await fleet.verifier_info(verifier)
    assert capacity is not None
    assert (capacity.block_size, capacity.num_blocks) == (info.block_size, info.num_blocks)
    assert capacity.max_sessions == info.max_sessions
    assert (await gateways.model_card())["max_model_len"] == CONTEXT_LENGTH
