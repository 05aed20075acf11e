"""Eight plain streams alone, then beside each attack: what they were answered, and how long it took."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from tests.attacks.attacks import ATTACKS, Request
from tests.attacks.stack import AttackedStack

NUM_STREAMS = 8
_NUM_TOKENS = 120
# requests, all at once after an attack; a Redis that an attack had filled refused 60 of 60
_NUM_AFTERWARDS = 60
_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Stream:
    """failure: "" or the status or error event that it ended with."""

    text: str
    seconds: float
    failure: str


@dataclass(frozen=True)
class Outcome:
    """Of one attack. slowdown: the slowest of the plain streams over the slowest of them alone. refused_afterwards: of
    60 short requests. gateway_peak_bytes: of resident memory. attackers: how often each status was answered to them.
    """

    name: str
    failures: list[str]
    num_changed: int
    slowdown: float
    refused_afterwards: int
    gateway_peak_bytes: int
    attackers: Counter[int]

    @property
    def has_hurt(self) -> bool:
        return bool(self.failures or self.num_changed or self.refused_afterwards)


async def run_attacks(stack: AttackedStack, tell: Callable[[str], None]) -> list[Outcome]:
    """tell: gets the name of what begins."""
    gateway_pid = stack.state.pids["gateway"]
    async with _client(stack, stack.neighbour_key) as neighbour, _client(stack, stack.attacker_key) as attacker:
        tell("plain streams alone")
        await _plain_streams(neighbour)  # the prompts are cached from here on
        runs = [await _plain_streams(neighbour) for _ in range(3)]
        alone_s = sorted(max(stream.seconds for stream in run) for run in runs)[1]
        outcomes = []
        for name, requests in ATTACKS.items():
            tell(name)
            outcome = await _attack(name, requests(), neighbour, attacker, gateway_pid, runs[0], alone_s)
            outcomes.append(outcome)
        return outcomes


def _client(stack: AttackedStack, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=stack.state.url,
        headers={"Authorization": f"Bearer {key}"},
        timeout=_TIMEOUT_S,
        # Not kept: a server closes idle connections, perhaps while the next request is on its way.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )


async def _attack(
    name: str,
    requests: list[Request],
    neighbour: httpx.AsyncClient,
    attacker: httpx.AsyncClient,
    gateway_pid: int,
    alone: list[Stream],
    alone_s: float,
) -> Outcome:
    _forget_peak_memory(gateway_pid)
    sent = [asyncio.create_task(_status(attacker, request)) for request in requests]
    await asyncio.sleep(0.05)  # the attack comes first
    streams = await _plain_streams(neighbour)
    statuses = await asyncio.gather(*sent)
    short = Request("/v1/completions", json.dumps({"prompt": "innocent", "max_tokens": 3}).encode())
    afterwards = await asyncio.gather(*(_status(neighbour, short) for _ in range(_NUM_AFTERWARDS)))
    return Outcome(
        name,
        failures=[stream.failure for stream in streams if stream.failure],
        num_changed=sum(stream.text != plain.text for stream, plain in zip(streams, alone, strict=True)),
        slowdown=max(stream.seconds for stream in streams) / alone_s,
        refused_afterwards=sum(status != httpx.codes.OK for status in afterwards),
        gateway_peak_bytes=_peak_memory(gateway_pid),
        attackers=Counter(statuses),
    )


async def _plain_streams(http: httpx.AsyncClient) -> list[Stream]:
    return await asyncio.gather(*(_plain_stream(http, index) for index in range(NUM_STREAMS)))


async def _plain_stream(http: httpx.AsyncClient, index: int) -> Stream:
    body = {
        "prompt": f"Once upon a time number {index} there was",
        "max_tokens": _NUM_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    started = time.monotonic()
    text, failure = "", ""
    async with http.stream("POST", "/v1/completions", json=body) as reply:
        if reply.status_code != httpx.codes.OK:
            failure = f"{reply.status_code} {(await reply.aread()).decode()[:200]}"
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                failure = failure or str(event.get("error", ""))
                text += "".join(choice["text"] for choice in event.get("choices", []))
    return Stream(text, time.monotonic() - started, failure)


async def _status(http: httpx.AsyncClient, request: Request) -> int:
    headers = {"Content-Type": "application/json"}
    return (await http.post(request.path, content=request.body, headers=headers)).status_code


def _forget_peak_memory(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")  # proc(5): resets VmHWM


def _peak_memory(pid: int) -> int:
    """Bytes of resident memory at most, since the peak was forgotten."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
