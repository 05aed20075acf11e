"""Kills of workers, gateways and verifiers in mid-stream under Dynamo's frontend: each text is compared with its first.

    python -m tests.plugins.dynamo --kills 100          # where ai-dynamo and Outrider are both installed

At temperature 1 with seeds: plain, with penalties, chats with tools, chats that must call one, and by a grammar. Of the
last two Dynamo migrates none: when their worker dies, the client asks again by the same id until a worker is found.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.plugins.dynamo.dynamo_fleet import MODEL, DynamoFleet

NUM_TOKENS = 120
NUM_AT_ONCE = 4
# times, seconds; that a client asks again: a dead worker stays in Dynamo's list for some seconds
_MOST_TRIES, _PAUSE_S = 20, 0.5
# A verifier loads for longest.
VICTIMS = ("worker", "gateway", "worker", "gateway", "worker", "gateway", "verifier")
_TOOL = {
    "name": "move",
    "parameters": {
        "type": "object",
        "properties": {"steps": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 9, "maxItems": 12}},
        "required": ["steps"],
        "additionalProperties": False,
    },
}
_TOOLS = [{"type": "function", "function": _TOOL}]
_CODE = ("def main():", "import os", "class Foo(", "    for i in range(", "def read_file(path):")


@dataclass
class Report:
    """struck: texts that a kill happened in the midst of, by what died. asked_again: of requests with a grammar."""

    kills: Counter[str] = field(default_factory=Counter)
    struck: Counter[str] = field(default_factory=Counter)
    num_texts: int = 0
    num_struck: int = 0
    asked_again: int = 0
    num_migrations: int = 0
    different: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0


def body_of(number: int) -> dict[str, Any]:
    """Requests of five kinds in turn."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": NUM_TOKENS, "temperature": 1, "seed": number, "stream": True}
    prompt = _CODE[number // 5 % len(_CODE)]
    chat = {**body, "messages": [{"role": "user", "content": prompt}], "tools": _TOOLS}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1, "top_p": 0.95}
    return (
        {**body, "prompt": prompt},
        {**body, **penalties, "prompt": prompt},
        chat,
        # The demo model would fill the call with white space alone.
        {**chat, "tool_choice": "required", "frequency_penalty": 2},
        {**body, "prompt": prompt, "guided_regex": "([a-z]{1,9} )+END"},
    )[number % 5]


def has_grammar(body: dict[str, Any]) -> bool:
    return "tool_choice" in body or "guided_regex" in body


@dataclass
class Stream:
    """What a client has of one answer."""

    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    finish: str = ""
    num_events: int = 0

    def add(self, choice: dict[str, Any]) -> None:
        self.num_events += 1
        self.finish = choice.get("finish_reason") or self.finish
        delta = choice.get("delta", choice)
        self.text += delta.get("text") or delta.get("content") or ""
        for call in delta.get("tool_calls") or ():
            known = self.calls.setdefault(call["index"], ["", ""])
            known[0] += call["function"].get("name") or ""
            known[1] += call["function"].get("arguments") or ""

    @property
    def said(self) -> str:
        return json.dumps([self.text, self.calls, self.finish])


class Storm:
    def __init__(self, fleet: DynamoFleet, num_kills: int, num_requests: int = 25) -> None:
        self._fleet = fleet
        self._num_kills = num_kills
        self._bodies = [body_of(number) for number in range(num_requests)]
        self.client = httpx.AsyncClient(base_url=fleet.frontend_url, timeout=300)
        self._seen: dict[asyncio.Task[Any] | None, Stream] = {}
        self._kinds_struck: dict[asyncio.Task[Any] | None, set[str]] = {}
        self._error = ""
        self.report = Report()

    async def run(self) -> Report:
        async with self.client:
            references = [await self.answer(body, str(uuid.uuid4())) for body in self._bodies]
            assert all(references), "an undisturbed request fails"
            began = time.monotonic()
            numbers, is_over = itertools.count(), asyncio.Event()

            async def client() -> None:
                while not is_over.is_set():
                    number = next(numbers) % len(self._bodies)
                    await self._compared(number, references[number])

            clients = [asyncio.create_task(client()) for _ in range(NUM_AT_ONCE)]
            try:
                await self._kill_all()
            finally:
                is_over.set()
                await asyncio.gather(*clients)
            self.report.seconds = time.monotonic() - began
            self.report.num_migrations = await self._migrations()
        return self.report

    async def _kill_all(self) -> None:
        for count, kind in zip(range(self._num_kills), itertools.cycle(VICTIMS), strict=False):
            parts = self._fleet.of_kind(kind)
            part = parts[count % len(parts)]
            while not any(stream.num_events > 2 for stream in self._seen.values()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            part.kill()
            self.report.kills[kind] += 1
            for task, stream in self._seen.items():
                if stream.num_events:
                    self._kinds_struck[task].add(kind)
            part.start()
            await self._fleet.wait_serving(part)
            await asyncio.sleep(0.3)

    async def _compared(self, number: int, reference: str) -> None:
        body, request_id = self._bodies[number], str(uuid.uuid4())
        said = await self.answer(body, request_id)
        for _ in range(_MOST_TRIES if has_grammar(body) else 0):
            if said:
                break
            self.report.asked_again += 1
            await asyncio.sleep(_PAUSE_S)
            said = await self.answer(body, request_id)
        self.report.num_texts += 1
        if not said:
            self.report.failed.append(f"request {number}: {self._error}")
        elif said != reference:
            self.report.different.append(f"request {number}: {said!r} for {reference!r}")

    async def answer(self, body: dict[str, Any], request_id: str) -> str:
        """All that was said; empty if it has no end."""
        task, stream = asyncio.current_task(), Stream()
        self._seen[task], self._kinds_struck[task] = stream, set()
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        try:
            headers = {"x-dynamo-request-id": request_id}
            async with self.client.stream("POST", path, json=body, headers=headers) as response:
                if response.status_code != 200:
                    self._error = (await response.aread()).decode()
                    return ""
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        event = json.loads(data)
                        for choice in event.get("choices", ()):
                            stream.add(choice)
                        self._error = data if "choices" not in event else ""
        except httpx.HTTPError as error:
            self._error = repr(error)
        finally:
            del self._seen[task]
            struck = self._kinds_struck.pop(task)
            self.report.struck.update(struck)
            self.report.num_struck += bool(struck)
        return stream.said if stream.finish else ""

    async def _migrations(self) -> int:
        text = (await self.client.get("/metrics")).text
        lines = [line for line in text.splitlines() if "migration_total" in line and not line.startswith("#")]
        return int(sum(float(line.rpartition(" ")[2]) for line in lines))
