"""The openai package, unchanged, against a running gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest
from e2e_stack import RunningStack

MODEL = "demo-target"
PROMPT = "import os\n\n\ndef read_lines(path):\n"
MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "system", "content": "You write Python."},
    {"role": "user", "content": "Write a function that reads a file."},
]
# Whatever the model says, also where it would end: so many tokens, and each of them in the text.
LONG = {"ignore_eos": True, "skip_special_tokens": False}


@pytest.fixture(scope="module")
def client(stack: RunningStack) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
async def async_client(stack: RunningStack) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        yield client


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completion(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=12, temperature=0, extra_body=LONG)
    assert answer.object == "text_completion"
    assert answer.model == MODEL
    (choice,) = answer.choices
    assert choice.text
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_default_max_tokens_is_16(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, temperature=0, extra_body=LONG)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_streamed_completion_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=48, temperature=0, extra_body=LONG)
    stream = client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=48,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=LONG,
    )
    chunks = list(stream)
    assert len(chunks) > 2
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == whole.choices[0].text
    reasons = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert reasons[-1] == "length"
    assert all(reason is None for reason in reasons[:-1])
    assert chunks[-1].choices == []
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == 48
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=20, temperature=0, extra_body=LONG
    )
    assert answer.object == "chat.completion"
    (choice,) = answer.choices
    assert choice.message.role == "assistant"
    assert choice.message.content
    assert choice.finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20


def test_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=32, temperature=0, extra_body=LONG
    )
    stream = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=32,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=LONG,
    )
    chunks = list(stream)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert deltas[0].role == "assistant"
    assert all(delta.role is None for delta in deltas[1:])
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 32


def test_n_gives_choices_of_their_own(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, n=3, max_tokens=32, temperature=1, seed=5, extra_body=LONG
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert len({choice.text for choice in answer.choices}) == 3
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 96


def test_n_in_a_stream(client: openai.OpenAI) -> None:
    fields = {"model": MODEL, "prompt": PROMPT, "n": 2, "max_tokens": 24, "temperature": 1, "seed": 6}
    whole = client.completions.create(**fields, extra_body=LONG)  # type: ignore[call-overload]
    texts = {0: "", 1: ""}
    for chunk in client.completions.create(**fields, stream=True, extra_body=LONG):  # type: ignore[call-overload]
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == {choice.index: choice.text for choice in whole.choices}


def test_several_prompts(client: openai.OpenAI) -> None:
    prompts = [PROMPT, "class Stack:\n", "for i in range("]
    answer = client.completions.create(model=MODEL, prompt=prompts, max_tokens=16, temperature=0, extra_body=LONG)
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=16, temperature=0, extra_body=LONG)
        for prompt in prompts
    ]
    assert [choice.text for choice in answer.choices] == [one.choices[0].text for one in alone]


@pytest.mark.parametrize("stream", [False, True])
def test_stop_cuts_at_the_first_occurrence(client: openai.OpenAI, stream: bool) -> None:
    full = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=64, temperature=0, extra_body=LONG)
    text = full.choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 3]
    fields = {"model": MODEL, "prompt": PROMPT, "max_tokens": 64, "temperature": 0, "stop": [stop, "\0never"]}
    if stream:
        chunks = list(client.completions.create(**fields, stream=True, extra_body=LONG))  # type: ignore[call-overload]
        choices = [choice for chunk in chunks for choice in chunk.choices]
        shown, reason = "".join(choice.text for choice in choices), choices[-1].finish_reason
    else:
        answer = client.completions.create(**fields, extra_body=LONG)  # type: ignore[call-overload]
        shown, reason = answer.choices[0].text, answer.choices[0].finish_reason
    assert shown == text[: text.index(stop)]
    assert reason == "stop"


def test_completion_logprobs(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=3, extra_body=LONG
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.text_offset is not None
    assert "".join(logprobs.tokens) == answer.choices[0].text
    assert logprobs.text_offset == [len("".join(logprobs.tokens[:place])) for place in range(8)]
    for token, logprob, top in zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob is not None
        assert logprob <= 0
        # Greedy: the chosen token is the likeliest, and it is in the list with the same figure.
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2, extra_body=LONG
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    shown = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert shown.decode() == answer.choices[0].message.content
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 2
        assert entry.top_logprobs[0].token == entry.token
        assert entry.top_logprobs[0].logprob == entry.logprob >= entry.top_logprobs[1].logprob


def test_echo(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, extra_body=LONG)
    echoed = client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=8, temperature=0, echo=True, logprobs=1, extra_body=LONG
    )
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    logprobs = echoed.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs is not None
    assert "".join(logprobs.tokens) == echoed.choices[0].text
    first, *others = list[float | None](logprobs.token_logprobs)  # the package's type knows no null, its answers do
    assert first is None
    assert all(logprob is not None and logprob <= 0 for logprob in others)
    assert echoed.usage is not None
    assert len(logprobs.tokens) == echoed.usage.total_tokens


def test_a_seed_repeats_and_another_differs(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(
            model=MODEL, prompt=PROMPT, max_tokens=48, temperature=1, seed=seed, extra_body=LONG
        )
        return answer.choices[0].text

    first = sample(1234)
    assert sample(1234) == first
    assert sample(1235) != first


def test_no_seed_differs(client: openai.OpenAI) -> None:
    def sample() -> str:
        answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=48, temperature=1, extra_body=LONG)
        return answer.choices[0].text

    assert sample() != sample()


def test_bad_request_names_the_field(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=PROMPT, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.type == "invalid_request_error"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[])
    assert caught.value.param == "messages"


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert caught.value.param == "model"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=4, extra_body={"model": "other"})


async def test_async_client(async_client: openai.AsyncOpenAI) -> None:
    whole = await async_client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, extra_body=LONG
    )
    stream = await async_client.completions.create(
        model=MODEL, prompt=PROMPT, max_tokens=24, temperature=0, stream=True, extra_body=LONG
    )
    text = ""
    async for chunk in stream:
        text += "".join(choice.text for choice in chunk.choices)
    assert text == whole.choices[0].text
    chat = await async_client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=4, extra_body=LONG)
    assert chat.choices[0].message.content
    with pytest.raises(openai.BadRequestError):
        await async_client.completions.create(model=MODEL, prompt=PROMPT, n=0)


def test_speculation_rides_in_extra_body(client: openai.OpenAI) -> None:
    extra = {**LONG, "speculation": {"method": "ngram", "num_speculative_tokens": 3}}
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=48, temperature=0, extra_body=extra)
    assert answer.model_extra is not None
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
