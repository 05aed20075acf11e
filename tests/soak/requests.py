"""What is asked of the stack: whole answers, streams, chats, broken connections, nonsense; and what must come of each.

Requests that can be asked again to the byte are compared with the first answer. Not here: how many at a time (load.py).
"""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.client.generate import CompletionRequest, StreamedToken, stream_completion
from tests.chaos.load import PARAMS, PROMPTS
from tests.soak.fleet import METHODS

_NUM_TOKENS = (8, 32, 96)
_WITHOUT_SEED: dict[str, Any] = {"temperature": 1.0}
# Each costs the services something of its own: several choices, log-probabilities, grammars, stop strings.
_EXTRAS: tuple[dict[str, Any], ...] = (
    {"n": 2},
    {"logprobs": 3},
    {"stop": ["\n\n"]},
    {"ignore_eos": False, "structured_outputs": {"regex": "[a-z]{1,20}( [a-z]{1,20}){0,5}"}},
)
_NONSENSE: tuple[tuple[str, str, bytes], ...] = (
    ("POST", "/v1/completions", b"{"),
    ("POST", "/v1/completions", b'{"prompt": 5}'),
    ("POST", "/v1/completions", b'{"prompt": "x", "max_tokens": -1}'),
    ("POST", "/v1/completions", b'{"prompt": "x", "model": "nobody"}'),
    ("POST", "/v1/completions", b'{"prompt": "x", "speculation": {"method": "nonsense"}}'),
    ("POST", "/v1/completions", b'{"prompt": "x", "structured_outputs": {"regex": "("}}'),
    ("POST", "/v1/completions", b'{"prompt": "' + b"def " * 4000 + b'"}'),
    ("POST", "/v1/chat/completions", b'{"messages": []}'),
    ("GET", "/v1/streams/cmpl-nobody", b""),
    ("GET", "/nowhere", b""),
)


class Wrong(Exception):
    """An answer that is not what was asked for."""


@dataclass
class Asker:
    """What all clients share. `answers`: the first one to each request that is asked more than once."""

    http: httpx.AsyncClient
    grpc_address: str
    rng: random.Random
    answers: dict[str, str] = field(default_factory=dict)

    def body(self, number: int) -> tuple[dict[str, Any], str]:
        """A request, and its name among those that have one right answer; half of the prompts are new ("")."""
        rng = self.rng
        params = rng.choice((*PARAMS, _WITHOUT_SEED))
        prompt = rng.choice(PROMPTS)
        num_tokens = rng.choice(_NUM_TOKENS)
        extras = rng.choice(_EXTRAS) if rng.random() < 0.3 else {}
        is_new = rng.random() < 0.5
        name = "" if is_new or extras or params is _WITHOUT_SEED else json.dumps([prompt, params, num_tokens])
        speculation = {
            "method": rng.choice((*METHODS, "auto", "off")),
            "num_speculative_tokens": rng.randint(1, 5),
            "token_tree": rng.random() < 0.3,
        }
        return {
            "prompt": f"# file {number}\n" + prompt * rng.randint(1, 8) if is_new else prompt,
            "max_tokens": num_tokens,
            "ignore_eos": True,
            "request_id": f"soak-{number}",
            "speculation": speculation,
            **params,
            **extras,
        }, name

    def compare(self, name: str, text: str) -> None:
        if name and self.answers.setdefault(name, text) != text:
            raise Wrong(f"other bytes than the first time for {name}: {text!r} and {self.answers[name]!r}")


Kind = Callable[[Asker, int], Awaitable[None]]


async def whole(asker: Asker, number: int) -> None:
    body, name = asker.body(number)
    answer = await asker.http.post("/v1/completions", json=body)
    _expect(answer.status_code == 200, answer)
    asker.compare(name, answer.json()["choices"][0]["text"])


async def streamed(asker: Asker, number: int) -> None:
    body, name = asker.body(number)
    text = ""
    async for _, more in _stream(asker.http, "POST", "/v1/completions", json={**body, "stream": True}):
        text += more
    asker.compare(name, text)


async def chat(asker: Asker, number: int) -> None:
    body, _ = asker.body(number)
    messages = [{"role": "user", "content": body.pop("prompt")}]
    body.pop("logprobs", None)
    answer = await asker.http.post("/v1/chat/completions", json={**body, "messages": messages})
    _expect(answer.status_code == 200, answer)


async def over_grpc(asker: Asker, number: int) -> None:
    """With a channel of its own."""
    prompt = asker.rng.choice(PROMPTS)
    request = CompletionRequest(prompt=prompt, max_tokens=32, ignore_eos=True, method=asker.rng.choice(METHODS))
    items = await asyncio.to_thread(lambda: list(stream_completion(asker.grpc_address, request)))
    text = "".join(item.text for item in items if isinstance(item, StreamedToken))
    asker.compare(json.dumps([prompt, PARAMS[0], 32]), text)


async def cancelled(asker: Asker, number: int) -> None:
    """A reader that goes away in the middle, or before anything has come."""
    body, _ = asker.body(number)
    if asker.rng.random() < 0.3:
        try:
            async with asyncio.timeout(asker.rng.uniform(0.0, 0.2)):
                await asker.http.post("/v1/completions", json=body)
        except TimeoutError:
            pass
        return
    await _read_some(asker, {**body, "stream": True})


async def resumed(asker: Asker, number: int) -> None:
    """The connection is lost after a few events; the rest comes over another."""
    body, name = asker.body(number)
    body = {**body, "stream": True, "n": 1}
    last_id, text = await _read_some(asker, body)
    headers = {"Last-Event-ID": last_id}
    async for _, more in _stream(asker.http, "GET", f"/v1/streams/cmpl-soak-{number}", headers=headers):
        text += more
    asker.compare(name, text)


async def nonsense(asker: Asker, number: int) -> None:
    method, path, body = asker.rng.choice(_NONSENSE)
    answer = await asker.http.request(method, path, content=body, headers={"content-type": "application/json"})
    _expect(400 <= answer.status_code < 500, answer)


async def looked_at(asker: Asker, number: int) -> None:
    answer = await asker.http.get(asker.rng.choice(("/v1/models", "/ready", "/health", "/version")))
    _expect(answer.status_code == 200, answer)


# How many of a hundred.
KINDS: dict[Kind, int] = {
    streamed: 40,
    whole: 18,
    chat: 8,
    over_grpc: 6,
    cancelled: 10,
    resumed: 8,
    nonsense: 8,
    looked_at: 2,
}
# Those that wait for all their tokens over REST: their seconds are the latency.
TIMED: tuple[Kind, ...] = (streamed, whole)


async def _read_some(asker: Asker, body: dict[str, Any]) -> tuple[str, str]:
    """The last event's id, and the text so far, of one to eight events; then the connection is gone."""
    last_id, text = "", ""
    num_wanted = asker.rng.randint(1, 8)
    async with aclosing(_stream(asker.http, "POST", "/v1/completions", json=body)) as events:
        async for event_id, more in events:
            last_id, text, num_wanted = event_id, text + more, num_wanted - 1
            if num_wanted == 0:
                break
    return last_id, text


async def _stream(
    http: httpx.AsyncClient, method: str, path: str, **what: Any
) -> AsyncGenerator[tuple[str, str], None]:
    """Id and text of each event of choice 0. Raises Wrong when it breaks off."""
    async with http.stream(method, path, **what) as answer:
        if answer.status_code != 200:
            await answer.aread()
        _expect(answer.status_code == 200, answer)
        event_id = ""
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "id":
                event_id = value
            elif name == "data":
                if value == "[DONE]":
                    return
                content = json.loads(value)
                if "error" in content:
                    raise Wrong(f"an error in a stream: {value[:300]}")
                yield event_id, "".join(choice["text"] for choice in content["choices"] if choice["index"] == 0)
    raise Wrong("a stream broke off")


def _expect(is_right: bool, answer: httpx.Response) -> None:
    if not is_right:
        raise Wrong(f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.text[:300]}")
