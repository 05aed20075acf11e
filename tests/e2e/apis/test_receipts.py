"""Receipts of a running stack, checked in another process: confirmed as they are, and not once they are changed."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import copy
import dataclasses
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e_stack import DEMO_TARGET

from outrider.gateway.answers.read import read_answer
from outrider.gateway.openai.receipt import Receipt
from outrider.offline.verify import ReceiptVerifier
from outrider.shared.errors import OutriderError

SEEDED = {"temperature": 1.0, "seed": 7}
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "sampled": SEEDED,
    "truncated": {**SEEDED, "temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.01},
    "penalties": {**SEEDED, "presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    "biases": {**SEEDED, "logit_bias": {"18": 3.0, "40": -100}, "min_tokens": 5, "bad_words": [" b"]},
    "choices with logprobs": {**SEEDED, "n": 2, "logprobs": 3, "stop": ["\n\n"]},
    "regex": {**SEEDED, "structured_outputs": {"regex": "([a-f]{3}-[0-9]{2},){4}"}},
    "schema": {**SEEDED, "structured_outputs": {"json": SCHEMA}},
    "echo of two prompts": {**SEEDED, "prompt": ["import os", "def f("], "echo": True, "return_token_ids": True},
}


@pytest.fixture(scope="module")
def verifier() -> Iterator[ReceiptVerifier]:
    with ReceiptVerifier(DEMO_TARGET, use_tqdm_on_load=False) as opened:
        yield opened


async def _answer(http: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    body = {"prompt": "import os\nimport ", "max_tokens": 40, "receipt": True, **fields}
    reply = await http.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def _with_params(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The answer with another request in its receipt."""
    receipt = Receipt.parse(answer["receipt"])
    requests = tuple(
        dataclasses.replace(request, sampling_params=dataclasses.replace(request.sampling_params, **changes))
        for request in receipt.record.prepared.requests
    )
    record = dataclasses.replace(
        receipt.record, prepared=dataclasses.replace(receipt.record.prepared, requests=requests)
    )
    return {**answer, "receipt": dict(dataclasses.replace(receipt, record=record).body())}


@pytest.mark.parametrize("kind", KINDS)
async def test_an_answer_is_confirmed_and_no_changed_one_is(
    http: httpx.AsyncClient, verifier: ReceiptVerifier, kind: str
) -> None:
    answer = await _answer(http, **KINDS[kind], speculation={"method": "draft_model"})
    found = verifier.verify(answer)
    assert found.conclusion == f"confirmed: all {found.num_tokens} tokens"
    assert found.num_tokens == sum(map(len, answer["receipt"]["token_ids"]))
    for choice, output in enumerate(answer["receipt"]["token_ids"]):
        for place in range(0, len(output), 7):
            changed = copy.deepcopy(answer)
            changed["receipt"]["token_ids"][choice][place] ^= 1
            assert f"token {place} of choice {choice} is" in verifier.verify(changed).wrong
        shorter = copy.deepcopy(answer)
        del shorter["receipt"]["token_ids"][choice][-1]
        assert "the answer ends before it" in verifier.verify(shorter).wrong
    reworded = copy.deepcopy(answer)
    reworded["choices"][0]["text"] += " "
    assert verifier.verify(reworded).wrong == "choice 0: its tokens make another text"


async def _streamed(http: httpx.AsyncClient, path: str, **fields: Any) -> str:
    body = {"max_tokens": 40, "receipt": True, "stream": True, **fields}
    reply = await http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.text


@pytest.mark.parametrize("kind", ["greedy", "choices with logprobs", "echo of two prompts"])
async def test_a_stream_is_confirmed_by_its_last_event(
    http: httpx.AsyncClient, verifier: ReceiptVerifier, kind: str
) -> None:
    fields = {"prompt": "import os\nimport ", **KINDS[kind], "stream_options": {"include_usage": True}}
    text = await _streamed(http, "/v1/completions", **fields)
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert ["receipt" in json.loads(event) for event in events[-3:-1]] == [False, True]
    assert json.loads(events[-2])["usage"]["completion_tokens"] > 0
    answer = read_answer(text, "stream")
    assert verifier.verify(answer).exit_code == 0
    whole = await _answer(http, **KINDS[kind])
    assert answer["receipt"]["token_ids"] == whole["receipt"]["token_ids"]
    # A stream without one event, and one with an event twice.
    for other in ([*events[:1], *events[2:]], [*events[:2], *events[1:]]):
        changed = read_answer("\n".join(f"data: {event}" for event in other), "stream")
        assert "its tokens make another" in verifier.verify(changed).wrong


async def test_other_parameters_are_not_confirmed(http: httpx.AsyncClient, verifier: ReceiptVerifier) -> None:
    answer = await _answer(http, **SEEDED, max_tokens=120)
    assert "other noise than its seed's" in verifier.verify(_with_params(answer, seed=8)).wrong
    for changes in (
        {"temperature": 1.1},
        {"top_p": 0.8},
        {"presence_penalty": 0.5},
        {"max_tokens": 60},
        {"min_p": 0.1},
    ):
        assert verifier.verify(_with_params(answer, **changes)).exit_code == 1, changes


async def test_another_kind_of_arithmetic_is_no_verdict(http: httpx.AsyncClient, verifier: ReceiptVerifier) -> None:
    answer = await _answer(http, **SEEDED)
    receipt = Receipt.parse(answer["receipt"])
    other = dataclasses.replace(receipt, record=dataclasses.replace(receipt.record, numerics="float32/cpu/cpu/tp1/00"))
    found = verifier.verify({**answer, "receipt": dict(other.body())})
    assert found.exit_code == 3
    assert "float32/cpu/cpu/tp1/00" in found.conclusion


async def test_a_chat_is_confirmed(http: httpx.AsyncClient, verifier: ReceiptVerifier) -> None:
    body = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 24, "receipt": True, **SEEDED}
    answer = (await http.post("/v1/chat/completions", json=body)).json()
    assert verifier.verify(answer).conclusion == "confirmed: all 24 tokens"
    answer["choices"][0]["message"]["content"] += "!"
    assert verifier.verify(answer).wrong == "choice 0: its tokens make another message"


async def test_a_chat_that_is_streamed_is_confirmed(http: httpx.AsyncClient, verifier: ReceiptVerifier) -> None:
    fields = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 24, "n": 2, **SEEDED}
    answer = read_answer(await _streamed(http, "/v1/chat/completions", **fields), "stream")
    assert verifier.verify(answer).conclusion == "confirmed: all 48 tokens"
    answer["choices"][1]["delta"]["content"] += "!"
    assert verifier.verify(answer).wrong == "choice 1: its tokens make another delta"


async def test_what_has_no_receipt_is_refused(http: httpx.AsyncClient) -> None:
    reply = await http.post("/v1/completions", json={"prompt": "a", "receipt": True, "temperature": 1.0})
    assert reply.status_code == 400
    assert "receipt needs exact mode" in reply.json()["error"]["message"]


async def test_spoilt_receipts_are_refused_or_not_confirmed(http: httpx.AsyncClient, verifier: ReceiptVerifier) -> None:
    """Bytes of the record flipped at random: a verdict or a refusal, never another exception or a hang."""
    answer, rng = await _answer(http, **KINDS["schema"]), random.Random(3)
    for _ in range(150):
        data = bytearray(base64.b64decode(answer["receipt"]["request"]))
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        receipt = {**answer["receipt"], "request": base64.b64encode(bytes(data)).decode()}
        with contextlib.suppress(OutriderError):
            verifier.verify({**answer, "receipt": receipt})
    assert verifier.verify(answer).exit_code == 0


@pytest.mark.storm
async def test_the_command_says_what_it_found(http: httpx.AsyncClient, tmp_path: Path) -> None:
    answer = await _answer(http, **SEEDED)
    file = tmp_path / "answer.json"
    command = [str(Path(sys.executable).with_name("outrider")), "verify", str(file), "--model", str(DEMO_TARGET)]
    codes = itertools.count()
    for told in ("confirmed: all 40 tokens", "not confirmed: token 3 of choice 0"):
        file.write_text(json.dumps(answer))
        done = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=250, check=False
        )
        assert told in done.stdout, done.stderr
        assert done.returncode == next(codes)
        answer["receipt"]["token_ids"][0][3] ^= 1
