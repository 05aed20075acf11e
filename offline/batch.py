"""Runs a batch of any length with bounded concurrency: each prompt is tokenized on its turn."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing

from outrider.gateway.decoding.generation import Generation
from outrider.offline.errors import GenerationFailed
from outrider.offline.outputs import Gathering, RequestOutput
from outrider.offline.progress import BatchProgress
from outrider.offline.prompts import Preparation, Prompt
from outrider.shared.request_params import SamplingParams


async def run_batch(
    generation: Generation,
    preparation: Preparation,
    prompts: Sequence[tuple[Prompt, SamplingParams]],
    progress: BatchProgress,
    *,
    max_num_requests: int,
) -> list[RequestOutput]:
    """Outputs in the order of the prompts. Raises GenerationFailed after all have ended."""
    outputs: list[RequestOutput | None] = [None] * len(prompts)
    failures: dict[int, Exception] = {}
    numbers = [preparation.next_number() for _ in prompts]
    turns = iter(range(len(prompts)))

    async def work() -> None:
        for place in turns:  # shared by all workers: each takes the next prompt
            try:
                outputs[place] = await _run(generation, preparation, numbers[place], prompts[place], progress)
            except Exception as error:
                failures[place] = error
            progress.request_ended()

    async with asyncio.TaskGroup() as group:
        for _ in range(min(max_num_requests, len(prompts))):
            group.create_task(work())
    if failures:
        raise GenerationFailed(outputs, failures, [str(number) for number in numbers])
    return [output for output in outputs if output is not None]


async def _run(
    generation: Generation,
    preparation: Preparation,
    number: int,
    prompt: tuple[Prompt, SamplingParams],
    progress: BatchProgress,
) -> RequestOutput:
    started = time.perf_counter()
    prepared = preparation.prepare(number, *prompt)
    gathering = Gathering(prepared.request, prepared.text, generation.tokenizer)
    async with aclosing(generation.generate(prepared.request)) as updates:
        async for update in updates:
            gathering.add(update, time.perf_counter() - started)
            progress.add(update)
    return gathering.output(time.perf_counter() - started)
