"""A verifier, a drafter or a gateway dies in the middle of tool calls' arguments: the calls are those of a quiet run.

Four streams at once, one per draft method, so each death hits all of them. n-gram and suffix drafts are the verifier's
own, which take the grammar into account; the draft model's come from the drafter.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from e2e_gateways import HTTP_TIMEOUT_S, Told, read_events
from e2e_rest import speculation

from tests.chaos.fleet import START_TIMEOUT_S, Fleet
from tests.e2e.e2e_pace import FEW_AHEAD, paced

pytestmark = [pytest.mark.storm, pytest.mark.timeout(900)]

CHAT = "/v1/chat/completions"
METHODS = ("ngram", "draft_model", "suffix", "auto")
# characters of arguments; the kill comes behind the first ones, and the rest is long enough to be cut off by it
CUT_AFTER, FEWEST, MOST = 20, 160, 200
# seconds per reply of Redis; a stream is at most one commit faster
PAUSE_S = 0.03
NOTE = {
    "type": "object",
    "properties": {
        "title": {"enum": ["one", "two"]},
        "text": {"type": "string", "pattern": f"^[a-z ]{{{FEWEST},{MOST}}}$"},
    },
    "required": ["title", "text"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": NOTE}} for name in ("note", "write")]
STYLE = {"x-guidance": {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}}
# The demo model knows no tools, so a grammar makes it call behind its text.
TEXT_AND_CALL = (
    'start: /[a-z ,.]{20,40}/ "\\n<tool_call>\\n{\\"name\\": \\"note\\", \\"arguments\\": " args "}\\n</tool_call>"\n'
    f"args: %json {json.dumps({**NOTE, **STYLE})}"
)
CASES: dict[str, dict[str, Any]] = {
    "forced": {"tool_choice": "required"},
    "after text": {"structured_outputs": {"grammar": TEXT_AND_CALL}},
}
LAWS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 4}}


class CallFleet(Fleet):
    """One verifier, which drafts too, one drafter, and two gateways that read calls; Redis slows the streams down."""

    paced_url = ""

    def _service_command(self, kind: str, index: int) -> list[str]:
        local = ["--local-methods", "ngram,suffix"] if kind == "verifier" else []
        return [*super()._service_command(kind, index), *local]

    def _gateway_command(self) -> list[str]:
        return [*super()._gateway_command(), *("--redis-url", self.paced_url), *FEW_AHEAD]


@pytest.fixture(scope="module")
async def fleet(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[CallFleet]:
    parts = CallFleet(tmp_path_factory.mktemp("calls"), num_gateways=2, num_drafters=1, num_verifiers=1)
    with paced(parts.redis.port, PAUSE_S) as parts.paced_url:
        async with parts:
            for url in parts.urls:
                await wait_ready(url)
            yield parts


async def wait_ready(url: str) -> None:
    """Until the gateway has reached its verifier."""
    async with asyncio.timeout(START_TIMEOUT_S), httpx.AsyncClient(base_url=url, timeout=HTTP_TIMEOUT_S) as http:
        while (await http.get("/ready")).status_code != 200:  # noqa: ASYNC110 only asking tells
            await asyncio.sleep(0.1)


def body(case: str, law: str, method: str) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "Write a note about a queue."}],
        "tools": TOOLS,
        "parallel_tool_calls": False,
        "max_tokens": 600,
        "stream": True,
        "return_token_ids": True,
        **CASES[case],
        **LAWS[law],
        # Outputs of earlier requests would make suffix drafts so good that its stream ends before the others begin.
        "cache_salt": f"{case} {law} {method} {uuid.uuid4()}",
        **speculation(method, 2),
    }


def choices_of(told: Told) -> list[dict[str, Any]]:
    return [choice for event in told.events for choice in event["choices"]]


def arguments_of(told: Told) -> str:
    entries = [entry for choice in choices_of(told) for entry in choice["delta"].get("tool_calls", ())]
    return "".join(entry["function"]["arguments"] for entry in entries)


def message_of(told: Told) -> dict[str, Any]:
    """All that the deltas come to, but for the call's id, which is the request's own."""
    choices = choices_of(told)
    entries = [entry for choice in choices for entry in choice["delta"].get("tool_calls", ())]
    return {
        "content": "".join(choice["delta"].get("content") or "" for choice in choices),
        "names": [entry["function"]["name"] for entry in entries if "name" in entry["function"]],
        "num_ids": sum("id" in entry for entry in entries),
        "arguments": arguments_of(told),
        "token_ids": [token_id for choice in choices for token_id in choice.get("token_ids") or ()],
        "finish_reason": choices[-1]["finish_reason"],
    }


class Kill:
    """Calls `strike` once all streams are in the middle of their arguments."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self.is_done = False
        self._strike = strike
        self._arrived: set[str] = set()

    def watch(self, method: str) -> Callable[[Told], bool]:
        def check(told: Told) -> bool:
            if not self.is_done and len(arguments_of(told)) >= CUT_AFTER:
                assert choices_of(told)[-1]["finish_reason"] is None, f"{method} ended before the others began"
                self._arrived.add(method)
                if self._arrived == set(METHODS):
                    self.is_done = True
                    self._strike()
            return False

        return check


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("victim", ["verifier-0", "drafter-0", "gateway-0"])
async def test_the_calls_are_those_of_a_quiet_run(fleet: CallFleet, victim: str, case: str, law: str) -> None:
    first_url, other_url = fleet.urls
    async with (
        httpx.AsyncClient(base_url=first_url, timeout=HTTP_TIMEOUT_S) as http,
        httpx.AsyncClient(base_url=other_url, timeout=HTTP_TIMEOUT_S) as other,
    ):
        quiet = message_of(await read_events(other, "POST", CHAT, body=body(case, law, "off")))
        assert set(quiet["names"]) <= {"note", "write"}
        assert (len(quiet["names"]), quiet["num_ids"], quiet["finish_reason"]) == (1, 1, "tool_calls")
        assert len(json.loads(quiet["arguments"])["text"]) >= FEWEST
        assert bool(quiet["content"]) == (case == "after text")

        part = fleet.parts[victim]

        def strike() -> None:
            part.kill()
            if part.kind != "gateway":
                part.start()

        kill = Kill(strike)
        streams = await asyncio.gather(
            *(
                read_events(http, "POST", CHAT, body=body(case, law, method), until=kill.watch(method))
                for method in METHODS
            )
        )
        assert kill.is_done
        for method, first in zip(METHODS, streams, strict=True):
            whole = first
            if part.kind == "gateway":
                assert first.broken
                whole += await read_events(other, "POST", CHAT, last_event_id=first.last_id)
            assert whole.done, (method, whole.error)
            assert message_of(whole) == quiet, method
            await _check_resumes(other, whole)
    if part.process is None:
        part.start()
    await fleet.wait_serving(part)
    await wait_ready(first_url)


async def _check_resumes(http: httpx.AsyncClient, whole: Told) -> None:
    """From any event on, the rest is byte for byte what followed."""
    stream = f"/v1/streams/{whole.events[0]['id']}"
    for place in {0, 1, len(whole.ids) // 3, len(whole.ids) // 2, len(whole.ids) - 2, len(whole.ids) - 1}:
        rest = await read_events(http, "GET", stream, last_event_id=whole.ids[place])
        assert rest.done
        assert rest.blocks == whole.blocks[place + 1 :], whole.ids[place]
