"""AsyncLLM on the demo models: the same outputs as LLM's, piece by piece, and what ends a request early."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from outrider import LLM, AsyncEngineArgs, AsyncLLM, TokensPrompt
from outrider.offline import RequestOutput, RequestOutputKind, SamplingParams
from outrider.shared.errors import ConfigError, InvalidRequest

MODELS = Path(__file__).parents[2] / "models"
SETTINGS = {
    "model": MODELS / "demo-target",
    "speculative_config": {"method": "draft_model", "model": MODELS / "demo-draft", "num_speculative_tokens": 4},
    "num_threads": 1,
    "kv_cache_mb": 64,
    "max_num_seqs": 4,
}
PROMPT = "def fibonacci(n):"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DELTAS = replace(GREEDY, output_kind=RequestOutputKind.DELTA)
LONG = replace(DELTAS, max_tokens=None)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncLLM]:
    made = AsyncLLM.from_engine_args(AsyncEngineArgs(**SETTINGS))
    yield made
    made.shutdown()


@pytest.fixture(scope="module")
def expected() -> RequestOutput:
    """LLM's, whose tokens test_llm.py compares with transformers'."""
    with LLM(**SETTINGS) as llm:
        [output] = llm.generate([PROMPT], replace(GREEDY, logprobs=2, prompt_logprobs=1))
    return output


async def all_of(outputs: AsyncGenerator[RequestOutput, None]) -> list[RequestOutput]:
    return [output async for output in outputs]


async def until_free(engine: AsyncLLM) -> None:
    async with asyncio.timeout(60):
        while engine._engines.verifier.num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_outputs_grow_to_those_of_llm(engine: AsyncLLM, expected: RequestOutput) -> None:
    params = replace(GREEDY, logprobs=2, prompt_logprobs=1)
    outputs = await all_of(engine.generate(PROMPT, params, "grows"))
    assert [output.finished for output in outputs] == [*[False] * (len(outputs) - 1), True]
    assert len(outputs) > 4
    for earlier, later in itertools.pairwise(outputs):
        assert later.outputs[0].text.startswith(earlier.outputs[0].text)
        assert earlier.outputs[0].finish_reason is None
    assert outputs[-1].outputs == expected.outputs
    assert outputs[-1].prompt_logprobs == expected.prompt_logprobs
    assert (outputs[-1].request_id, outputs[-1].prompt) == ("grows", PROMPT)
    speculation = outputs[-1].metrics.speculative_decoding
    assert speculation is not None
    assert speculation["num_accepted_draft_tokens"] > 0


async def test_deltas_add_up_to_it(engine: AsyncLLM, expected: RequestOutput) -> None:
    outputs = await all_of(engine.generate(PROMPT, replace(DELTAS, logprobs=2), "deltas"))
    pieces = [piece for output in outputs for piece in output.outputs]
    [choice] = expected.outputs
    assert choice.logprobs is not None
    assert "".join(piece.text for piece in pieces) == choice.text
    assert [token for piece in pieces for token in piece.token_ids] == choice.token_ids
    assert [row for piece in pieces for row in piece.logprobs or ()] == choice.logprobs
    assert all(piece.token_ids for piece in pieces)


async def test_final_only_is_one_output(engine: AsyncLLM, expected: RequestOutput) -> None:
    params = replace(GREEDY, output_kind=RequestOutputKind.FINAL_ONLY)
    prompt = TokensPrompt(prompt_token_ids=expected.prompt_token_ids)
    [output] = await all_of(engine.generate(prompt=prompt, sampling_params=params, request_id="final"))
    assert output.finished
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids


async def test_requests_run_side_by_side_and_each_gets_its_own(engine: AsyncLLM) -> None:
    """More than max_num_seqs at once, and two choices each: seeded, so that each is known from a run alone."""
    params = [replace(DELTAS, temperature=0.9, seed=seed, n=2) for seed in range(6)]

    async def texts(one: SamplingParams, name: str) -> list[str]:
        found = ["", ""]
        async for output in engine.generate(PROMPT, one, f"{name}-{one.seed}"):
            for piece in output.outputs:
                found[piece.index] += piece.text
        return found

    together = await asyncio.gather(*(texts(one, "together") for one in params))
    assert len({text for both in together for text in both}) == 12
    assert together == [await texts(one, "alone") for one in params]


async def test_a_slow_consumer_gets_fewer_outputs_and_all_of_the_text(
    engine: AsyncLLM, expected: RequestOutput
) -> None:
    async with aclosing(engine.generate(PROMPT, DELTAS, "slow")) as outputs:
        first = await anext(outputs)
        async with asyncio.timeout(60):
            while engine._engines.verifier.num_sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        rest = [output async for output in outputs]
    assert len(rest) == 1
    assert first.outputs[0].text + rest[0].outputs[0].text == expected.outputs[0].text


async def test_abort_ends_the_output_and_frees_the_session(engine: AsyncLLM) -> None:
    outputs = engine.generate(PROMPT, LONG, "long")
    await anext(outputs)
    await engine.abort(["nobody", "long"])
    rest = await all_of(outputs)
    assert rest[-1].finished
    assert [piece.finish_reason for piece in rest[-1].outputs] == ["abort"]
    await until_free(engine)


async def test_closing_the_generator_frees_the_session(engine: AsyncLLM) -> None:
    async with aclosing(engine.generate(PROMPT, LONG, "left")) as outputs:
        await anext(outputs)
    await until_free(engine)
    await all_of(engine.generate(PROMPT, GREEDY, "left"))  # its id is free again


async def test_a_cancelled_consumer_frees_the_session(engine: AsyncLLM) -> None:
    consumer = asyncio.create_task(all_of(engine.generate(PROMPT, LONG, "cancelled")))
    async with asyncio.timeout(60):
        while not engine._engines.verifier.num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    consumer.cancel()
    await asyncio.gather(consumer, return_exceptions=True)
    await until_free(engine)


async def test_the_id_of_a_running_request_is_refused(engine: AsyncLLM) -> None:
    async with aclosing(engine.generate(PROMPT, LONG, "twice")) as outputs:
        await anext(outputs)
        with pytest.raises(InvalidRequest, match="request_id 'twice' is in use"):
            await all_of(engine.generate(PROMPT, GREEDY, "twice"))


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        (PROMPT, replace(GREEDY, top_p=2.0), "top_p"),
        ({"prompt": PROMPT, "multi_modal_data": {"image": b""}}, GREEDY, "'multi_modal_data' is not supported"),
        (3, GREEDY, "a prompt must be text"),
    ],
)
async def test_a_wrong_request_names_the_field(
    engine: AsyncLLM, prompt: object, params: SamplingParams, says: str
) -> None:
    for _ in range(2):  # the id is free again
        with pytest.raises(InvalidRequest, match=says):
            await all_of(engine.generate(prompt, params, "wrong"))


async def test_shutdown_aborts_what_runs() -> None:
    engine = AsyncLLM(**SETTINGS)
    outputs = engine.generate(PROMPT, LONG, "running")
    await anext(outputs)
    engine.shutdown()
    rest = await asyncio.wait_for(all_of(outputs), timeout=60)
    assert [piece.finish_reason for piece in rest[-1].outputs] == ["abort"]
    with pytest.raises(ConfigError, match="this AsyncLLM is closed"):
        await all_of(engine.generate(PROMPT, GREEDY, "later"))
