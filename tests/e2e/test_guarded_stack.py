"""A stack of real processes that asks for keys and logs all it can: keys, SIGHUP, time limits, logs without prompts."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from e2e_stack import DEMO_DRAFT, DEMO_TARGET, RunningStack, run_stack, wait_until

from outrider.client import AsyncOutriderClient, SamplingParams
from outrider.client.generate import Access, CompletionRequest, stream_completion
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.api_keys import key_line, new_key
from outrider.shared.errors import Unauthenticated
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.storm

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# Words that nothing in this repository says; whatever a request says, some of them are in it.
SECRET = "Xylograph Quizmaster"
LOG_TIMEOUT_S = 60.0
# Many times longer than a request's second on any machine, for the stack is paced.
LONG_RUN: dict[str, Any] = {"prompt": SECRET, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}


@dataclass(frozen=True)
class Guarded:
    """A running stack, its key file, alice's key."""

    stack: RunningStack
    run_dir: Path
    key_file: Path
    key: str

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.key}"}

    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self.run_dir.glob("*.log")))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    run_dir = tmp_path_factory.mktemp("guarded-stack")
    key, key_file = new_key(), run_dir / "api-keys"
    key_file.write_text(key_line("alice", key))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_API_KEYS_FILE", str(key_file))
        patch.setenv("OUTRIDER_LOG_LEVEL", "debug")
        patch.setenv("OUTRIDER_FAILOVER_S", "8")
        with run_stack(run_dir, dtype="auto", draft_model=DEMO_DRAFT, is_paced=True) as stack:
            yield Guarded(stack, run_dir, key_file, key)


@pytest.fixture
async def http(guarded: Guarded) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=guarded.stack.url, timeout=120, headers=guarded.headers) as client:
        yield client


async def status_of(guarded: Guarded, key: str) -> int:
    body = {"prompt": "import", "max_tokens": 2}
    async with httpx.AsyncClient(base_url=guarded.stack.url, timeout=120) as client:
        return (await client.post(COMPLETIONS, json=body, headers={"authorization": f"Bearer {key}"})).status_code


async def grpc_ended(guarded: Guarded, request: gateway_pb2.GenerateRequest, key: str, **options: Any) -> Any:
    """Status code of a Generate call that is read to its end."""
    async with grpc.aio.insecure_channel(guarded.stack.state.grpc_address) as channel:
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        call = stub.Generate(request, metadata=(("authorization", f"Bearer {key}"),), **options)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            return error.code()
        return await call.code()


def test_the_client_and_its_command_bring_the_key(guarded: Guarded) -> None:
    request = CompletionRequest("import", max_tokens=4, ignore_eos=True)
    address = guarded.stack.state.grpc_address
    *tokens, end = stream_completion(address, request, Access(guarded.key))
    assert len(tokens) == end.completion_tokens == 4
    with pytest.raises(Unauthenticated):
        list(stream_completion(address, request, Access("wrong")))
    command = [
        sys.executable,
        "-m",
        "outrider.client.cli.main",
        "complete",
        "import",
        "--max-tokens",
        "4",
        "--address",
        address,
    ]
    environ = {**os.environ, "OUTRIDER_API_KEY": guarded.key}
    found = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert "4 tokens" in found.stdout


async def test_the_asyncio_client_brings_the_key(guarded: Guarded) -> None:
    address = guarded.stack.state.grpc_address
    async with AsyncOutriderClient(address, api_key=guarded.key) as client:
        assert len((await client.generate("import", SamplingParams(max_tokens=4, ignore_eos=True))).tokens) == 4
    async with AsyncOutriderClient(address, api_key="wrong") as client:
        with pytest.raises(Unauthenticated):
            await client.generate("import")


async def test_keys_at_both_servers(guarded: Guarded) -> None:
    assert await status_of(guarded, guarded.key) == 200
    assert await status_of(guarded, "or-wrong") == 401
    request = gateway_pb2.GenerateRequest(prompt="import", sampling_params=common_pb2.SamplingParams(max_tokens=2))
    assert await grpc_ended(guarded, request, guarded.key) is grpc.StatusCode.OK
    assert await grpc_ended(guarded, request, "or-wrong") is grpc.StatusCode.UNAUTHENTICATED


async def test_the_file_is_read_again_on_sighup(guarded: Guarded) -> None:
    before, other = guarded.key_file.read_text(), new_key()
    guarded.key_file.write_text("\n".join((before, key_line("bob", other))))
    assert await status_of(guarded, other) == 401
    guarded.stack.signal("gateway", signal.SIGHUP)
    wait_until(lambda: "2 API keys from" in guarded.log(), LOG_TIMEOUT_S, "the gateway has read its keys again")
    assert await status_of(guarded, other) == 200
    # A broken file keeps the keys and is told; the next good one counts.
    guarded.key_file.write_text("bob")
    guarded.stack.signal("gateway", signal.SIGHUP)
    refused = "the API keys are unchanged"
    wait_until(lambda: refused in guarded.log(), LOG_TIMEOUT_S, "the gateway has refused the file")
    assert [await status_of(guarded, key) for key in (guarded.key, other)] == [200, 200]
    guarded.key_file.write_text(before)
    num_said = guarded.log().count("1 API keys from")  # at its start
    guarded.stack.signal("gateway", signal.SIGHUP)
    wait_until(
        lambda: guarded.log().count("1 API keys from") > num_said, LOG_TIMEOUT_S, "the gateway has read its keys again"
    )
    assert [await status_of(guarded, key) for key in (guarded.key, other)] == [200, 401]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_timeout_frees_both_services(guarded: Guarded, http: httpx.AsyncClient, stream: bool) -> None:
    body = {**LONG_RUN, "stream": stream}
    num_tokens = guarded.stack.metric("outrider:generation_tokens_total")
    answer = await http.post(COMPLETIONS, json=body, headers={"x-request-timeout": "1"})
    if stream and answer.status_code == 200:  # else the second was over before the first token
        last = answer.text.strip().split("\n\n")[-1]
        error = json.loads(last.split("data: ", 1)[1])["error"]
    else:
        assert answer.status_code == 504
        error = answer.json()["error"]
    assert error["type"] == "timeout_error"
    check_cut_off(guarded, num_tokens)


async def test_a_grpc_deadline_frees_both_services(guarded: Guarded) -> None:
    params = common_pb2.SamplingParams(max_tokens=LONG_RUN["max_tokens"], ignore_eos=True)
    request = gateway_pb2.GenerateRequest(prompt="import", sampling_params=params)
    num_tokens = guarded.stack.metric("outrider:generation_tokens_total")
    assert await grpc_ended(guarded, request, guarded.key, timeout=1) is grpc.StatusCode.DEADLINE_EXCEEDED
    check_cut_off(guarded, num_tokens)


def check_cut_off(guarded: Guarded, num_tokens_before: float) -> None:
    """Both services are free, and not because the output has come to its end."""
    guarded.stack.wait_idle()
    assert guarded.stack.metric("outrider:generation_tokens_total") - num_tokens_before < LONG_RUN["max_tokens"]


# ---- logs -------------------------------------------------------------------------------------------------------

BAD_BODIES: list[tuple[str, bytes]] = [
    (COMPLETIONS, f'{{"prompt": "{SECRET}'.encode()),
    (COMPLETIONS, json.dumps({"prompt": {"text": SECRET}}).encode()),
    (COMPLETIONS, json.dumps({"prompt": [SECRET, 5]}).encode()),
    (COMPLETIONS, json.dumps({"prompt": SECRET, "temperature": SECRET}).encode()),
    (COMPLETIONS, json.dumps({"prompt": SECRET, "model": SECRET}).encode()),
    (COMPLETIONS, json.dumps({"prompt": SECRET * 20_000}).encode()),
    (COMPLETIONS, json.dumps({"prompt": SECRET, "max_tokens": 10**6}).encode()),
    (COMPLETIONS, json.dumps({"prompt": SECRET, "structured_outputs": {"regex": f"({SECRET}"}}).encode()),
    (COMPLETIONS, json.dumps({"prompt": SECRET, "structured_outputs": {"grammar": SECRET}}).encode()),
    (CHAT, json.dumps({"messages": [{"role": SECRET, "content": SECRET}]}).encode()),
    (CHAT, json.dumps({"messages": [{"role": "user", "content": [{"type": "image", "text": SECRET}]}]}).encode()),
    (CHAT, json.dumps({"messages": SECRET}).encode()),
    ("/tokenize", json.dumps({"prompt": [SECRET]}).encode()),
    (f"/v1/{SECRET}", b"{}"),
]


def good_bodies(token_ids: list[int]) -> list[tuple[str, dict[str, Any]]]:
    common: dict[str, Any] = {"max_tokens": 12, "temperature": 0}
    chat = [{"role": "system", "content": SECRET}, {"role": "user", "content": SECRET}]
    return [
        (COMPLETIONS, {**common, "prompt": SECRET, "stop": [SECRET], "bad_words": [SECRET], "echo": True}),
        (COMPLETIONS, {**common, "prompt": token_ids, "n": 2, "logprobs": 2, "seed": 3, "temperature": 1}),
        (COMPLETIONS, {**common, "prompt": SECRET, "structured_outputs": {"choice": [SECRET]}}),
        (COMPLETIONS, {**common, "prompt": SECRET, "speculation": {"method": "ngram"}, "cache_salt": SECRET}),
        (CHAT, {**common, "messages": chat}),
        ("/tokenize", {"prompt": SECRET, "return_token_strs": True}),
        ("/detokenize", {"tokens": token_ids}),
    ]


async def test_no_log_tells_what_a_request_said(guarded: Guarded, http: httpx.AsyncClient) -> None:
    """At log level debug, with good requests, wrong ones, and ones that lose a drafter and the verifier on the way."""
    tokenizer = Tokenizer.load(DEMO_TARGET)
    token_ids = tokenizer.encode(SECRET)
    outputs: list[str] = []
    for path, body in good_bodies(token_ids):
        answer = await http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        for choice in answer.json().get("choices", ()):
            outputs.append(choice["text"] if "text" in choice else choice["message"]["content"])
        if path in (COMPLETIONS, CHAT):
            assert "[DONE]" in (await http.post(path, json={**body, "stream": True, "echo": False})).text
    for path, content in BAD_BODIES:
        answer = await http.post(path, content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (400, 404), (content[:80], answer.text)
    assert await status_of(guarded, SECRET.replace(" ", "-")) == 401
    params = common_pb2.SamplingParams(max_tokens=8)
    for request in (
        gateway_pb2.GenerateRequest(prompt=SECRET, sampling_params=params, stop=[SECRET]),
        gateway_pb2.GenerateRequest(prompt=SECRET, model=SECRET),
        gateway_pb2.GenerateRequest(prompt=SECRET, sampling_params=common_pb2.SamplingParams(temperature=-1)),
    ):
        await grpc_ended(guarded, request, guarded.key)
    await lose_the_fleet(guarded, http)

    log = guarded.log()
    assert "DEBUG" in log
    assert "gone" in log  # the watch of the fleet, so the failures above were seen
    told = [*SECRET.split(), guarded.key, *(output for output in outputs if len(output.strip()) > 12)]
    told += [", ".join(map(str, token_ids)), " ".join(map(str, token_ids))]
    assert [text for text in told if text in log] == []


async def lose_the_fleet(guarded: Guarded, http: httpx.AsyncClient) -> None:
    """Two requests whose drafter and then verifier die; the second one ends with an error."""
    body = {**LONG_RUN, "speculation": {"method": "draft_model"}}
    answering = asyncio.create_task(http.post(COMPLETIONS, json=body))
    streaming = asyncio.create_task(http.post(CHAT, json={**chat_body(body), "stream": True}))
    await asyncio.to_thread(wait_until, lambda: guarded.stack.num_sessions() == (2, 2), 60, "both requests run")
    guarded.stack.kill("drafter-0")
    lost = "outrider:drafters_lost_total"
    await asyncio.to_thread(wait_until, lambda: guarded.stack.metric(lost) > 0, 60, "the drafter's loss is seen")
    guarded.stack.kill("verifier")
    assert (await answering).status_code == 503
    assert '"code": 503' in (await streaming).text.replace('"code":503', '"code": 503')


def chat_body(body: dict[str, Any]) -> dict[str, Any]:
    rest = {name: value for name, value in body.items() if name != "prompt"}
    return {**rest, "messages": [{"role": "user", "content": body["prompt"]}]}
