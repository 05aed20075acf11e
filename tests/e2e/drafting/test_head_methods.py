"""Drafts from the target's hidden states, and in another vocabulary, through processes: no byte changes.

Whatever a prefix cache holds, chain or tree, and whoever dies. And drafting goes on: a drafter that takes over is sent
the hidden states again, a verifier that takes over computes them again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from e2e_gateways import Told, read_events
from e2e_heads import HeadFleet, run_head_fleet
from e2e_rest import Answer, complete, complete_all, speculation

from tests.grid.heads import HEADS

pytestmark = [pytest.mark.storm, pytest.mark.timeout(600)]
PROMPT = "import sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.path = path\n\n    def read("
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "seeded": {"temperature": 0.8, "seed": 41}}
NUM_TOKENS = 48
# Of the streams that are interrupted after so many events.
NUM_STREAM_TOKENS = 600
INTERRUPT_AFTER = 30
# At their end: nearly each of these tokens is from a round with a draft again.
NUM_LAST_TOKENS = 24
SHAPES = {"chain": {}, "tree": {"token_tree": True}}
WAYS = [(method, shape) for method in (*HEADS, "draft_model") for shape in SHAPES]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HeadFleet]:
    with run_head_fleet(tmp_path_factory.mktemp("head-fleet")) as running:
        yield running


@pytest.fixture(scope="module")
async def http(fleet: HeadFleet) -> AsyncIterator[httpx.AsyncClient]:
    async with fleet.gateway.client() as client:
        yield client


def body(setting: str, method: str, shape: str = "chain", *, salt: str = "", **fields: Any) -> dict[str, Any]:
    length = None if method == "off" else 4
    return {
        "prompt": PROMPT,
        "max_tokens": NUM_TOKENS,
        "ignore_eos": True,
        "skip_special_tokens": False,
        "cache_salt": salt or f"{setting}-{method}-{shape}",
        **SETTINGS[setting],
        **speculation(method, length, annotate=True, **(SHAPES[shape] if method != "off" else {})),
        **fields,
    }


def was_drafted(answer: Answer) -> bool:
    """Nearly every round has a draft; a token of one without (the first, the last before the end) is the target's."""
    return answer.speculation["num_draft_tokens"] > 0 and answer.origins.count("target") <= 4


@pytest.mark.parametrize("setting", SETTINGS)
async def test_bytes_are_those_without_drafts_whatever_is_cached(http: httpx.AsyncClient, setting: str) -> None:
    """A fresh prompt; one that is cached with its hidden states; one that a request without drafts has left there."""
    plain = body(setting, "off")
    reference = await complete(http, plain)
    assert set(reference.origins) == {"target"}
    for cached in ("", "with hidden states", "without"):
        salt = plain["cache_salt"] if cached == "without" else ""
        answers = await complete_all(http, [body(setting, *way, salt=salt) for way in WAYS], at_once=4)
        for way, answer in zip(WAYS, answers, strict=True):
            assert (answer.token_ids, answer.text) == (reference.token_ids, reference.text), (way, cached)
            assert was_drafted(answer), (way, cached, answer.speculation, answer.origins)
            assert answer.speculation["num_spec_tokens"] == 4
            if way[0] == "draft_model":
                assert answer.speculation["num_accepted_draft_tokens"] > NUM_TOKENS / 8
    for salt in (f"{setting}-eagle3-tree", plain["cache_salt"]):
        reply = await http.post("/v1/completions", json={**plain, "cache_salt": salt, "max_tokens": 1})
        assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 16


async def streams(http: httpx.AsyncClient, setting: str, interrupt: Callable[[], None]) -> dict[tuple[str, str], Told]:
    """All methods at once, half of them as trees; `interrupt` is called when each has told of a part."""
    ways = [(method, ("chain", "tree")[place % 2]) for place, method in enumerate(HEADS)]
    progress = dict.fromkeys(ways, 0)
    far_enough = asyncio.Event()

    async def read(way: tuple[str, str]) -> Told:
        def note(told: Told) -> bool:
            progress[way] = len(told.ids)
            if min(progress.values()) >= INTERRUPT_AFTER:
                far_enough.set()
            return False

        request = body(setting, *way, salt="streams", max_tokens=NUM_STREAM_TOKENS, stream=True)
        return await read_events(http, "POST", "/v1/completions", body=request, until=note)

    reading = [asyncio.create_task(read(way)) for way in ways]
    await far_enough.wait()
    assert not any(task.done() for task in reading)
    await asyncio.to_thread(interrupt)
    return dict(zip(ways, await asyncio.gather(*reading), strict=True))


def origins(told: Told) -> list[str]:
    return [origin for event in told.events for choice in event["choices"] for origin in choice["outrider"]["origins"]]


def check(told: Told, reference: Answer) -> None:
    """The same bytes, drafted before the incident and again after it."""
    assert told.done
    assert told.error is None
    assert tuple(told.token_ids()) == reference.token_ids
    assert told.text() == reference.text
    marks = origins(told)
    drafted = [mark in ("accepted", "corrected", "bonus") for mark in marks]
    assert sum(drafted[:INTERRUPT_AFTER]) > INTERRUPT_AFTER / 2, marks
    assert "target" in marks[INTERRUPT_AFTER:-NUM_LAST_TOKENS], "nothing was interrupted"
    assert sum(drafted[-NUM_LAST_TOKENS:]) >= NUM_LAST_TOKENS - 2, marks


@pytest.mark.parametrize(("service", "setting"), [("drafter", "greedy"), ("verifier", "seeded")])
async def test_another_takes_over_in_mid_stream(
    fleet: HeadFleet, http: httpx.AsyncClient, service: str, setting: str
) -> None:
    """All sessions are at one process while the other sleeps; that one wakes, the first is killed."""
    reference = await complete(http, body(setting, "off", salt="streams", max_tokens=NUM_STREAM_TOKENS))
    first, second = fleet.members(service)
    lost = {"drafter": "outrider:drafters_lost_total", "verifier": "outrider:verifier_failovers_total"}[service]
    before = fleet.metric(lost)
    await asyncio.to_thread(fleet.freeze, service, second)
    held: list[int] = []

    def interrupt() -> None:
        fleet.thaw(service, second)
        held.append(fleet.num_sessions(service, first))
        fleet.kill(service, first)

    told = await streams(http, setting, interrupt)
    assert held == [len(HEADS)]
    for answer in told.values():
        check(answer, reference)
    # Until the gateway's next look at its fleet a session may find the dead one again.
    assert fleet.metric(lost) >= before + len(HEADS)
