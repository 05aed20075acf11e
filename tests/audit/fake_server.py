"""A small OpenAI-compatible server over tables of laws: correct speculative sampling, or one planted defect.

`FakeServer.transport` answers httpx in this process; `serve` opens a port, for tests of the whole command.
"""

from __future__ import annotations

import json
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import numpy as np

from tests.audit.fake_laws import VOCABULARY, Laws, listed, request_settings
from tests.audit.fake_sampler import Sampled, Sampler

# s; so that requests sent at once are there at once
_OVERLAP_S = 0.001
LAWS = Laws()


class FakeServer:
    def __init__(self, defect: str = "", seed: int = 0) -> None:
        self.defect = defect
        self._rng = np.random.default_rng(seed)
        self._active = 0
        self._lock = threading.Lock()

    @property
    def transport(self) -> httpx.MockTransport:
        def answer(request: httpx.Request) -> httpx.Response:
            status, kind, data = self.respond(request.url.path, request.content)
            return httpx.Response(status, headers={"content-type": kind}, stream=httpx.ByteStream(self.spoil(data)))

        return httpx.MockTransport(answer)

    def spoil(self, data: bytes) -> bytes:
        """For tests: what is sent in an answer's place."""
        return data

    def respond(self, path: str, content: bytes) -> tuple[int, str, bytes]:
        body = json.loads(content) if content else {}
        with self._lock:
            self._active += 1
        try:
            if path.startswith("/v1/c"):
                time.sleep(_OVERLAP_S)
            answer = self._handle(path, body)
        except ValueError as error:
            return 400, "text/plain", str(error).encode()
        finally:
            with self._lock:
                self._active -= 1
        if answer is None:
            return 404, "text/plain", b"no such route"
        if isinstance(answer, list):
            lines = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in answer]
            return 200, "text/event-stream", b"".join([*lines, b"data: [DONE]\n\n"])
        return 200, "application/json", json.dumps(answer).encode()

    def _handle(self, path: str, body: dict[str, Any]) -> Any:
        if path == "/v1/models":
            return {"data": [{"id": "fake"}]}
        if path == "/tokenize":
            return {"tokens": LAWS.encode(body["prompt"])} if "prompt" in body else {}
        if path == "/v1/chat/completions":
            return self._call(body)
        return self._complete(body) if path == "/v1/completions" else None

    def _complete(self, body: dict[str, Any]) -> Any:
        prompt = body["prompt"] if isinstance(body["prompt"], list) else LAWS.encode(body["prompt"])
        if not all(0 <= token < VOCABULARY for token in prompt):
            raise ValueError("a token outside of the vocabulary")
        count, settings = int(body.get("n") or 1), request_settings(body)
        choices, rounds = [], []
        for index in range(count):
            sampled = self._sample(body, prompt, index, settings)
            text, finish = self._cut_text(sampled, settings)
            choice = {"index": index, "text": text, "finish_reason": finish, "token_ids": sampled.ids}
            if settings["logprobs"]:
                choice["logprobs"] = _logprobs(sampled, settings["logprobs"])
            choices.append(choice)
            rounds.append(sampled.rounds)
        total = sum(len(choice["token_ids"]) for choice in choices)
        answer = {"choices": choices, "usage": {"prompt_tokens": len(prompt), "completion_tokens": total}}
        if body.get("stream"):
            return [*_events(choices[0], rounds[0]), {"choices": [], "usage": answer["usage"]}]
        if size := body.get("prompt_logprobs"):
            choices[0]["prompt_logprobs"] = _prompt_logprobs(prompt, size)
        return answer

    def _sample(self, body: dict[str, Any], prompt: list[int], index: int, settings: dict[str, Any]) -> Sampled:
        with self._lock:
            fresh, in_crowd = int(self._rng.integers(1 << 62)), self._active > 1
        seed: tuple[int, ...] = (fresh, 2)
        if body.get("seed") is not None:
            seed = (int(body["seed"]), zlib.crc32(np.array(prompt).tobytes()), index)
            seed += (fresh,) if self.defect == "seed_crowd" and in_crowd else ()
        elif self.defect == "shared_noise":
            seed = (12345, 1)
        rng = np.random.default_rng(seed)
        return Sampler(LAWS, settings, rng, self.defect, in_crowd, seed[0]).sample(prompt)

    def _cut_text(self, sampled: Sampled, settings: dict[str, Any]) -> tuple[str, str]:
        text = LAWS.text(sampled.ids)
        seen = LAWS.text(sampled.ids[-sampled.rounds[-1] :]) if self.defect == "stop_cross" else text
        found = [text.find(stop) for stop in settings["stop"] if stop in seen]
        if not found:
            return text, "length" if len(sampled.ids) >= settings["max_tokens"] else "stop"
        return text[: min(found)], "stop"

    def _call(self, body: dict[str, Any]) -> Any:
        digest = zlib.crc32(json.dumps(body["messages"]).encode())
        days = int(np.random.default_rng(digest).integers(1, 90))
        wanted = {"city": "Paris", "days": days, "note": 'bring "warm" clothes'}
        arguments = json.dumps(wanted)
        if self.defect == "tool_differs" and self._rng.random() < 0.05:
            arguments = arguments.replace('"days": ', '"days": 1')
        name = body["tools"][0]["function"]["name"]
        if not body.get("stream"):
            call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
            choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": _pieces(arguments)}
            return {"choices": [choice], "usage": {"completion_tokens": 20}}
        pieces = _pieces(arguments)["content"]
        parts = [piece["token"] for piece in pieces]
        if self.defect == "tool_garble":
            parts = [part[1:] if self._rng.random() < 0.04 else part for part in parts]
        functions = [{"name": name, "arguments": ""}, *({"arguments": part} for part in parts)]
        deltas = [{"tool_calls": [{"index": 0, "function": function}]} for function in functions]
        events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
        for event, piece in zip(events[1:], pieces, strict=True):
            event["choices"][0]["logprobs"] = {"content": [piece]}
        return [*events, {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}]


def _pieces(arguments: str) -> dict[str, list[Any]]:
    """The arguments as the chat route's logprobs of tokens of five characters, each nearly certain."""
    tokens = [arguments[i : i + 5] for i in range(0, len(arguments), 5)]
    lists = [[{"token": token, "logprob": -0.01}, {"token": "?", "logprob": -5.0}] for token in tokens]
    return {"content": [{"token": t, "logprob": -0.01, "top_logprobs": e} for t, e in zip(tokens, lists, strict=True)]}


def _logprobs(sampled: Sampled, size: int) -> dict[str, list[Any]]:
    names = [f"token_id:{token}" for token in sampled.ids]
    pairs = list(zip(sampled.ids, sampled.reported, strict=True))
    chosen = [0.0 if law is None else float(law[token]) for token, law in pairs]
    lists = [{f"token_id:{t}": 0.0} if law is None else listed(law, t, size) for t, law in pairs]
    return {"tokens": names, "token_logprobs": chosen, "top_logprobs": lists}


def _prompt_logprobs(prompt: list[int], size: int) -> list[Any]:
    laws: list[Any] = [None]
    for place in range(1, len(prompt)):
        entries = listed(LAWS.target[LAWS.state(prompt[:place])], prompt[place], size)
        laws.append({key.removeprefix("token_id:"): {"logprob": value} for key, value in entries.items()})
    return laws


def _events(choice: dict[str, Any], rounds: list[int]) -> list[dict[str, Any]]:
    """One event per round. A stop string's text ends at once, as the whole answer's does."""
    events, start, sent = [], 0, 0
    for size in rounds:
        ids = choice["token_ids"][start : start + size]
        text = LAWS.text(choice["token_ids"][: start + size])[: len(choice["text"])]
        event = {"index": 0, "text": text[sent:], "token_ids": ids, "finish_reason": None}
        if "logprobs" in choice:
            event["logprobs"] = {key: column[start : start + size] for key, column in choice["logprobs"].items()}
        start, sent = start + size, len(text)
        events.append({"choices": [event]})
    events[-1]["choices"][0]["finish_reason"] = choice["finish_reason"]
    return events


@contextmanager
def serve(fake: FakeServer) -> Iterator[str]:
    """Its address while the server runs."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_GET(self) -> None:
            self._reply(b"")

        def do_POST(self) -> None:
            self._reply(self.rfile.read(int(self.headers["content-length"])))

        def _reply(self, content: bytes) -> None:
            status, kind, data = fake.respond(self.path, content)
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
