"""A stream in whose midst something happens, and what it must give all the same: the tokens of a quiet run."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import httpx
from e2e_rest import Answer, complete, speculation
from e2e_stack import RunningStack

NUM_TOKENS = 400
# The signal is sent once this many tokens were read; the rest must come after it.
KILL_AFTER = 40
# Which of the gateway's counters moves when a service of this name is lost.
_LOSSES = {"verifier": "outrider:verifier_failovers_total", "drafter-0": "outrider:drafters_lost_total"}
BODY: dict[str, Any] = {
    "prompt": "class Queue:\n    def __init__(self):\n",
    "max_tokens": NUM_TOKENS,
    "temperature": 0.9,
    "seed": 99,
    "ignore_eos": True,
    "skip_special_tokens": False,
    **speculation("draft_model", 2, annotate=True),
}


@dataclass
class Seen:
    """What a client has read of a stream; `longest_gap_s` is between two events."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[str] = field(default_factory=list)
    longest_gap_s: float = 0.0
    done: bool = False


async def read_stream(http: httpx.AsyncClient, body: dict[str, Any], seen: Seen) -> AsyncGenerator[None, None]:
    """Yields after each event."""
    last = time.perf_counter()
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as reply:
        assert reply.status_code == 200
        async for line in reply.aiter_lines():
            if not line.startswith("data: "):
                continue
            now = time.perf_counter()
            seen.longest_gap_s, last = max(seen.longest_gap_s, now - last), now
            if line == "data: [DONE]":
                seen.done = True
                return
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                seen.text += choice["text"]
                seen.token_ids += choice["outrider"]["token_ids"]
                seen.origins += choice["outrider"]["origins"]
            yield


async def interrupted(http: httpx.AsyncClient, interrupt: Callable[[], None], body: dict[str, Any] = BODY) -> Seen:
    """The whole stream, with `interrupt()` called after KILL_AFTER tokens, once drafts are accepted."""
    seen = Seen()
    called = False
    async with aclosing(read_stream(http, body, seen)) as events:
        async for _ in events:
            # A drafter that is held up at first is asked again after some tokens.
            if not called and len(seen.token_ids) >= KILL_AFTER and "accepted" in seen.origins:
                assert len(seen.token_ids) < NUM_TOKENS / 2
                interrupt()
                called = True
    assert called
    assert seen.done
    return seen


async def goes_on_elsewhere(
    stack: RunningStack, http: httpx.AsyncClient, service: str, body: dict[str, Any], quiet: Answer
) -> tuple[Seen, Answer]:
    """Kills the service in the midst of a stream, starts another, and asks once more: `quiet`'s tokens, and drafts.

    Returns both answers.
    """
    losses = stack.metric(_LOSSES[service])

    def kill() -> None:
        stack.kill(service)
        stack.revive()

    seen = await interrupted(http, kill, body)
    assert (seen.text, tuple(seen.token_ids)) == (quiet.text, quiet.token_ids)
    assert len(seen.token_ids) == NUM_TOKENS
    assert stack.metric(_LOSSES[service]) > losses
    await asyncio.to_thread(stack.wait_fleet)
    again = await complete(http, body)
    assert again.token_ids == quiet.token_ids
    assert again.speculation["num_accepted_draft_tokens"] > 0
    await asyncio.to_thread(stack.wait_idle)
    return seen, again
