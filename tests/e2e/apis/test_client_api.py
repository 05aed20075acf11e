"""The Python client against a running stack: blocking, asyncio and REST say the same."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from e2e_stack import RunningStack

from outrider.client import (
    AsyncOutriderClient,
    BatchFailed,
    Completion,
    OutriderClient,
    SamplingParams,
    Speculation,
    StructuredOutputsParams,
)
from outrider.shared.errors import DeadlineExceeded, InvalidRequest, UnknownModel

PROMPT = "import os\n\n\ndef read_lines(path):\n"
MESSAGES = [{"role": "system", "content": "You write Python."}, {"role": "user", "content": "Read a file."}]
NO_TOKEN = 1_000_000
# As fields of SamplingParams, and of the body of a REST request.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0, "max_tokens": 40},
    "seed": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 7, "max_tokens": 40},
    "penalties": {
        "temperature": 0,
        "max_tokens": 40,
        "min_tokens": 10,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "logit_bias": {40: 3.0},
    },
    "stop": {"temperature": 0, "max_tokens": 64, "stop": [" of a"], "ignore_eos": True},
    "logprobs": {"temperature": 0.8, "seed": 3, "max_tokens": 24, "logprobs": 3},
    "regex": {"temperature": 0.8, "seed": 3, "max_tokens": 24, "structured_outputs": {"regex": "[a-f]{8}"}},
    "choice": {"temperature": 0, "max_tokens": 24, "structured_outputs": {"choice": ["left", "right"]}},
    "off": {"temperature": 0, "max_tokens": 24, "speculation": {"method": "off"}},
    "ngram": {"temperature": 0, "max_tokens": 24, "speculation": {"method": "ngram", "num_speculative_tokens": 3}},
}


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[OutriderClient]:
    with OutriderClient(stack.state.grpc_address, timeout_s=120) as client:
        yield client


@pytest.fixture(scope="module")
async def async_client(stack: RunningStack) -> AsyncIterator[AsyncOutriderClient]:
    async with AsyncOutriderClient(stack.state.grpc_address, timeout_s=120) as client:
        yield client


def params_of(fields: dict[str, Any]) -> SamplingParams:
    given = dict(fields)
    if "structured_outputs" in given:
        given["structured_outputs"] = StructuredOutputsParams(**given["structured_outputs"])
    if "speculation" in given:
        given["speculation"] = Speculation(**given["speculation"])
    return SamplingParams(**given)


def alike(completion: Completion) -> Completion:
    """Without what may differ between two runs: the id, and how much was drafted, cached and accepted."""
    tokens = tuple(dataclasses.replace(token, origin="") for token in completion.tokens)
    usage = dataclasses.replace(completion.usage, cached_tokens=0)
    figures = type(completion.speculation)(0, 0, (), 0, 0, 0, 0)
    return dataclasses.replace(completion, request_id="", tokens=tokens, usage=usage, speculation=figures)


@pytest.mark.parametrize("name", CASES)
async def test_both_clients_say_what_rest_says(
    name: str, client: OutriderClient, async_client: AsyncOutriderClient, http: httpx.AsyncClient
) -> None:
    params = params_of(CASES[name])
    blocking, awaited = client.generate(PROMPT, params), await async_client.generate(PROMPT, params)
    assert alike(blocking) == alike(awaited)
    body = {"prompt": PROMPT, "return_token_ids": True, **CASES[name]}
    answer = (await http.post("/v1/completions", json=body)).raise_for_status().json()
    choice = answer["choices"][0]
    assert (blocking.text, list(blocking.token_ids)) == (choice["text"], choice["token_ids"])
    assert (blocking.finish_reason, blocking.stop_reason) == (choice["finish_reason"], choice["stop_reason"])
    assert blocking.usage.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert blocking.usage.completion_tokens == len(blocking.tokens) == answer["usage"]["completion_tokens"]
    if name in ("stop", "regex", "choice"):
        assert blocking.finish_reason == "stop"
    if name == "logprobs":
        check_logprobs(blocking, choice["logprobs"])
    else:
        assert choice["logprobs"] is blocking.cumulative_logprob is None


def check_logprobs(completion: Completion, of_rest: dict[str, Any]) -> None:
    entries = [token.logprob for token in completion.tokens if token.logprob is not None]
    assert [entry.logprob for entry in entries] == of_rest["token_logprobs"]
    for entry, row in zip(entries, of_rest["top_logprobs"], strict=True):
        assert len(entry.top) == 3
        # REST's row has the chosen token besides the likeliest, and texts, of which two ids may have the same.
        assert {logprob for _, logprob in entry.top} <= {*row.values()}
        assert entry.rank >= 1
    assert completion.cumulative_logprob == sum(of_rest["token_logprobs"])


async def test_chat_and_token_ids(
    client: OutriderClient, async_client: AsyncOutriderClient, http: httpx.AsyncClient
) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    of_rest = (await http.post("/v1/chat/completions", json=body)).raise_for_status().json()
    said = of_rest["choices"][0]["message"]["content"]
    assert client.generate(MESSAGES, params).text == (await async_client.generate(MESSAGES, params)).text == said
    ids = (await http.post("/tokenize", json={"prompt": PROMPT})).json()["tokens"]
    assert client.generate(ids, params).token_ids == client.generate(PROMPT, params).token_ids


async def test_a_stream_is_the_whole_answer_in_parts(client: OutriderClient, async_client: AsyncOutriderClient) -> None:
    params = SamplingParams(temperature=0, max_tokens=48, stop="xyz")
    blocking = list(client.stream(PROMPT, params))
    awaited = [update async for update in async_client.stream(PROMPT, params)]
    whole = client.generate(PROMPT, params)
    for updates in (blocking, awaited):
        assert len(updates) > 2
        assert "".join(update.text for update in updates) == whole.text
        assert [token.token_id for update in updates for token in update.tokens] == list(whole.token_ids)
        assert [update.completion is None for update in updates] == [True] * (len(updates) - 1) + [False]


async def test_a_stream_that_is_left_frees_both_services(
    stack: RunningStack, client: OutriderClient, async_client: AsyncOutriderClient
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1500, ignore_eos=True)
    blocking = client.stream(PROMPT, params)
    next(blocking)
    blocking.close()
    awaited = async_client.stream(PROMPT, params)
    await anext(awaited)
    await awaited.aclose()
    stack.wait_idle()


@pytest.mark.parametrize("max_concurrency", [1, 8])
async def test_one_bad_prompt_of_a_batch(
    client: OutriderClient, async_client: AsyncOutriderClient, max_concurrency: int
) -> None:
    prompts: list[Any] = [f"x = {number}\n" for number in range(6)]
    prompts[2] = [1, NO_TOKEN]
    params = [SamplingParams(temperature=0, max_tokens=4 + number, ignore_eos=True) for number in range(6)]
    told: list[tuple[int, int]] = []
    with pytest.raises(BatchFailed, match="1 of 6 prompts failed, first prompt 2") as blocking:
        client.batch(prompts, params, max_concurrency=max_concurrency, progress=lambda *done: told.append(done))
    assert told == [(number, 6) for number in range(1, 7)]
    with pytest.raises(BatchFailed) as awaited:
        await async_client.batch(prompts, params, max_concurrency=max_concurrency)
    for raised in (blocking.value, awaited.value):
        assert isinstance(raised.failures.pop(2), InvalidRequest)
        assert not raised.failures
        assert raised.completions[2] is None
        lengths = [completion and len(completion.tokens) for completion in raised.completions]
        assert lengths == [4, 5, None, 7, 8, 9]
    good = client.batch(prompts[:2], params[:2])
    assert [answer.text for answer in good] == [answer.text for answer in raised.completions[:2] if answer]


async def test_a_deadline_ends_the_request_everywhere(
    stack: RunningStack, client: OutriderClient, async_client: AsyncOutriderClient
) -> None:
    params = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True, speculation=Speculation(method="off"))
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s"):
        client.generate(PROMPT, params, timeout_s=0.5)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.5 s"):
        await async_client.generate(PROMPT, params, timeout_s=0.5)
    assert time.monotonic() - began < 30  # half a second each, and what a busy machine adds
    stack.wait_idle()


async def test_errors_have_types_and_name_the_field(
    stack: RunningStack, client: OutriderClient, async_client: AsyncOutriderClient
) -> None:
    with pytest.raises(InvalidRequest) as seen_by_server:
        client.generate([1, NO_TOKEN])
    assert seen_by_server.value.param == "prompt_token_ids"
    with pytest.raises(InvalidRequest) as seen_here:
        await async_client.generate(PROMPT, SamplingParams(temperature=-1))
    assert seen_here.value.param == "temperature"
    with OutriderClient(stack.state.grpc_address, model="other") as picky, pytest.raises(UnknownModel, match="other"):
        picky.generate(PROMPT)


async def test_json_follows_its_schema(async_client: AsyncOutriderClient) -> None:
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    outputs = StructuredOutputsParams(json=schema)
    answer = await async_client.generate("{", SamplingParams(max_tokens=64, seed=1, structured_outputs=outputs))
    if answer.finish_reason == "stop":
        assert isinstance(json.loads(answer.text)["on"], bool)
    else:
        assert answer.text.lstrip().startswith("{")
