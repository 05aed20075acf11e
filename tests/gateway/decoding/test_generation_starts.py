"""When the outputs of requests are started: the gateway's own generation, without a network behind it."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from outrider.gateway.admission.fair_starts import MAX_PARALLEL_CHOICES, Place
from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.request.commit_sink import CommitSink
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate, ValidRequest
from outrider.shared.errors import Unavailable
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import Commit, DrafterInfo, FinishReason, SessionSpec, TokenOrigin
from outrider.shared.request_params import MAX_SPECULATIVE_TOKENS, Speculation
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.shared.speculative_config import parse_speculative_config
from tests.gateway.small_tokenizers import byte_fallback_tokenizer
from tests.gateway.verifier_fleet import Fleet, members_with, verifier_info


class Log:
    """gateway.request.types.EntryLog; keeps nothing."""

    async def append(self, entry: LogEntry) -> None:
        pass


class SlowGeneration(Generation):
    """Each output is a token at once, and an end when `gate` is set."""

    def __init__(self, num_places: int) -> None:
        async def nobody(channel: object, timeout_s: float) -> DrafterInfo:
            raise Unavailable("there is none")

        super().__init__(
            config=GatewayConfig(),
            speculative=parse_speculative_config(""),
            tokenizer=byte_fallback_tokenizer(),
            verifiers=Fleet(members_with(replace(verifier_info(), max_sessions=num_places))),
            drafters=Pool("drafter", (), nobody),
            metrics=GatewayMetrics(CollectorRegistry()),
        )
        self.gate = asyncio.Event()
        self.started: list[str] = []

    async def _decode_with_failover(
        self, request: ValidRequest, spec: SessionSpec, sink: CommitSink, place: Place
    ) -> None:
        self.started.append(spec.session_id)
        if request.request_id == "fails":
            raise Unavailable("no")
        await sink.put(Commit(spec.epoch, 0, (65,), (TokenOrigin.TARGET,)))
        await self.gate.wait()
        await sink.put(Commit(spec.epoch, 1, (66,), (TokenOrigin.TARGET,), finish_reason=FinishReason.LENGTH))
        await sink.drain()


def request(name: str, num_choices: int = 1, *, epoch: int = 0) -> ValidRequest:
    starts = tuple(ChoiceStart(index, SpeculationMode.EXACT, 0, Log(), epoch=epoch) for index in range(num_choices))
    return ValidRequest(name, (65,), SamplingParams(max_tokens=2), n=num_choices, starts=starts, caller=name[0])


async def answered(generation: Generation, wanted: ValidRequest) -> list[GenerationUpdate]:
    async with aclosing(generation.generate(wanted)) as updates:
        return [update async for update in updates]


async def until_started(generation: SlowGeneration, count: int) -> None:
    async with asyncio.timeout(60):
        while len(generation.started) < count:  # noqa: ASYNC110
            await asyncio.sleep(0)
    for _ in range(50):
        await asyncio.sleep(0)
    assert len(generation.started) == count


@pytest.mark.parametrize("num_choices", [3, MAX_PARALLEL_CHOICES + 3])
async def test_more_outputs_than_places_come_one_after_the_other(num_choices: int) -> None:
    generation = SlowGeneration(num_places=2)
    asked = asyncio.create_task(answered(generation, request("a", num_choices)))
    await until_started(generation, 2)
    assert generation.starts.num_waiting == min(num_choices, MAX_PARALLEL_CHOICES) - 2
    generation.gate.set()
    updates = await asyncio.wait_for(asked, timeout=60)
    assert {update.choice_index for update in updates if update.finish_reason} == set(range(num_choices))


async def test_a_resumed_output_does_not_wait_behind_new_ones() -> None:
    generation = SlowGeneration(num_places=1)
    new = [asyncio.create_task(answered(generation, request(f"a{index}"))) for index in range(3)]
    await until_started(generation, 1)
    resumed = asyncio.create_task(answered(generation, request("b", epoch=1)))
    await until_started(generation, 2)
    assert generation.started == ["a0-0", "b-0"]
    generation.gate.set()
    await asyncio.wait_for(asyncio.gather(resumed, *new), timeout=60)


async def test_a_client_that_leaves_frees_its_places_and_its_turns() -> None:
    generation = SlowGeneration(num_places=2)
    gone = asyncio.create_task(answered(generation, request("a", 5)))
    await until_started(generation, 2)
    waiting = asyncio.create_task(answered(generation, request("b")))
    await asyncio.sleep(0)
    gone.cancel()
    await until_started(generation, 3)
    assert generation.started[-1] == "b-0"
    generation.gate.set()
    assert (await asyncio.wait_for(waiting, timeout=60))[-1].finish_reason is FinishReason.LENGTH


async def test_an_output_that_fails_frees_its_place() -> None:
    generation = SlowGeneration(num_places=1)
    generation.gate.set()
    for _ in range(3):
        with pytest.raises(Unavailable):
            await asyncio.wait_for(answered(generation, request("fails")), timeout=60)
    assert await asyncio.wait_for(answered(generation, request("b")), timeout=60)


@pytest.mark.parametrize(
    ("speculation", "predicted", "most"),
    [
        (Speculation(method="auto"), (), 5),
        (Speculation(method="auto"), (1, 2), MAX_SPECULATIVE_TOKENS),
        (Speculation(method="auto", num_speculative_tokens=7), (1, 2), 7),
        (Speculation(method="ngram"), (1, 2), 5),
    ],
    ids=["no prediction", "a prediction", "its own number", "a named method"],
)
def test_a_prediction_may_be_drafted_longer_than_what_methods_guess(
    speculation: Speculation, predicted: tuple[int, ...], most: int
) -> None:
    plan = SlowGeneration(1)._draft_plan(replace(request("a"), speculation=speculation, predicted_token_ids=predicted))
    assert plan is not None
    assert (plan.method, plan.num_draft_tokens) == (speculation.method, most)
