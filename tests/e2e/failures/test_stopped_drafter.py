"""A drafter stops in mid-stream: the stream goes on without drafts."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from e2e_gateways import Fleet, Told, read_events
from e2e_processes import START_TIMEOUT_S, ServiceProcess, drafter_info, start_all, verifier_process
from e2e_rest import complete, speculation
from e2e_stack import wait_until

from outrider.client.stack.commands import StackState
from outrider.gateway.proposals.remote_source import ALONE_RUN
from tests.redis_server import RedisServer

pytestmark = pytest.mark.storm
STOP_AFTER = 40
# A busy machine's stream is ahead of its reader, by less than what lies between the two.
NUM_TOKENS, NUM_LAST_TOKENS = 240, 24
# Alike lines: n-grams are found to the end.
BODY: dict[str, Any] = {
    "prompt": "".join(f"x{number} = f(y{number})\n" for number in range(12)),
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "skip_special_tokens": False,
    **speculation("ngram", 3, annotate=True),
}


@dataclass
class Drafted:
    fleet: Fleet
    drafters: list[ServiceProcess]


@pytest.fixture(scope="module")
def drafted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Drafted]:
    run_dir = tmp_path_factory.mktemp("drafted")
    verifier = verifier_process(run_dir, "bfloat16")
    drafters = [ServiceProcess("outrider.drafter_service", run_dir, "--methods", "ngram") for _ in range(2)]
    with RedisServer(run_dir) as redis:
        state = StackState(verifiers=[verifier.address], drafters=[drafter.address for drafter in drafters])
        fleet = Fleet(state, redis, run_dir)
        try:
            start_all([verifier, *drafters])
            yield Drafted(fleet, drafters)
        finally:
            fleet.close()
            for process in (verifier, *drafters):
                process.kill()


def origins(told: Told) -> list[str]:
    return [origin for event in told.events for choice in event["choices"] for origin in choice["outrider"]["origins"]]


def drafters_of(told: Told) -> list[str]:
    """Their addresses, of each round that had a draft."""
    rounds = [one for event in told.events for choice in event["choices"] for one in choice["outrider"]["rounds"]]
    return [one["drafter"] for one in rounds if one["drafter"]]


def longest_alone(told: Told) -> int:
    """Tokens in a row that the target said without a draft."""
    return max(len(list(run)) for origin, run in itertools.groupby(origins(told)) if origin == "target")


async def test_a_drafter_that_stops(drafted: Drafted) -> None:
    stopped: list[ServiceProcess] = []
    gateway = drafted.fleet.gateway(draft_timeout_ms="3000")

    def stop(told: Told) -> bool:
        if told.num_tokens() >= STOP_AFTER and drafters_of(told) and not stopped:
            stopped.extend(drafter for drafter in drafted.drafters if drafter.address == drafters_of(told)[-1])
            stopped[0].signal(signal.SIGSTOP)
        return False

    wait_until(
        lambda: gateway.metric("outrider:fleet_members", service="drafter") == 2, START_TIMEOUT_S, "both drafters"
    )
    async with gateway.client() as http:
        quiet = await complete(http, BODY)  # from here on it is known how long an answer takes
        for drafter in drafted.drafters:
            while (await drafter_info(drafter)).num_sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        try:
            told = await read_events(http, "POST", "/v1/completions", body={**BODY, "stream": True}, until=stop)
        finally:
            for drafter in stopped:
                drafter.signal(signal.SIGCONT)
    assert told.done
    assert tuple(told.token_ids()) == quiet.token_ids
    assert "accepted" in origins(told)[:STOP_AFTER]
    is_drafted_to_the_end = "accepted" in origins(told)[-NUM_LAST_TOKENS:]
    assert longest_alone(told) >= ALONE_RUN
    # One that has said nothing for 15 s is lost, and the other one is found: a slow machine's stream sees that.
    assert not is_drafted_to_the_end or gateway.metric("outrider:drafters_lost_total") > 0
    assert gateway.metric("outrider:draft_timeouts_total") > 0
