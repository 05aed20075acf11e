"""One timed request: time to first token, gaps between updates, number of tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from outrider.client.bench.acceptance import Acceptance
from outrider.client.rest import clear_transport, parse_event, refusal
from outrider.shared.errors import OutriderError


@dataclass
class RequestResult:
    """Times in seconds. gaps_s: between updates with text; an update may bring several tokens. text: all of it.

    num_prompt_tokens None: the server sends no usage, and num_output_tokens counts updates. error: why it failed.
    """

    num_prompt_tokens: int | None = None
    num_output_tokens: int = 0
    first_token_s: float = 0.0
    seconds: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    acceptance: Acceptance | None = None
    error: str = ""
    text: str = ""


async def timed_request(client: httpx.AsyncClient, endpoint: str, body: dict[str, Any]) -> RequestResult:
    """Makes one request and times it. Never raises for server or network failures: `error` reports them."""
    result = RequestResult()
    try:
        with clear_transport(str(client.base_url)):
            await _stream(client, endpoint, body, result)
        if not result.first_token_s:
            result.error = "the stream ended without a token"
    except OutriderError as error:
        result.error = error.message
    return result


async def _stream(client: httpx.AsyncClient, endpoint: str, body: dict[str, Any], result: RequestResult) -> None:
    num_updates = 0
    started = last = time.perf_counter()
    async with client.stream("POST", endpoint, json=body) as response:
        if response.status_code != 200:
            raise refusal(response.status_code, (await response.aread()).decode(errors="replace"))
        async for line in response.aiter_lines():
            event = parse_event(line)
            if event is None:
                continue
            if text := _text(event):
                result.text += text
                now = time.perf_counter()
                if num_updates:
                    result.gaps_s.append(now - last)
                else:
                    result.first_token_s = now - started
                num_updates += 1
                last = now
            _read_figures(event, result)
    result.seconds = last - started
    if result.num_prompt_tokens is None:
        result.num_output_tokens = num_updates


def _text(event: dict[str, Any]) -> str:
    """Returns the text of the first choice that has some, reasoning included."""
    for choice in event.get("choices") or []:
        said = choice.get("delta") or choice
        for name in ("text", "content", "reasoning_content", "reasoning"):
            if said.get(name):
                return str(said[name])
    return ""


def _read_figures(event: dict[str, Any], result: RequestResult) -> None:
    usage = event.get("usage")
    if usage:
        result.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
        result.num_output_tokens = int(usage.get("completion_tokens") or 0)
    figures = (event.get("metrics") or {}).get("speculative_decoding")
    if figures:
        result.acceptance = Acceptance(
            figures["num_spec_steps"], figures["num_draft_tokens"], figures["num_accepted_draft_tokens"]
        )
