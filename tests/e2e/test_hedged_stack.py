"""A drafter stops in mid-stream: with hedging another one drafts on, without it the stream goes on without drafts."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from e2e_gateways import Fleet, Told, read_events
from e2e_processes import START_TIMEOUT_S, ServiceProcess, drafter_info, start_all, verifier_process
from e2e_rest import complete, speculation
from e2e_stack import wait_until

from client.stack import StackState
from tests.redis_server import RedisServer

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
    drafters = [ServiceProcess("drafter_service", run_dir, "--methods", "ngram") for _ in range(2)]
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


@pytest.mark.parametrize("hedged", [True, False])
async def test_a_drafter_that_stops(drafted: Drafted, hedged: bool) -> None:
    """The first of two that are idle gets the session."""
    first = drafted.drafters[0]
    gateway = drafted.fleet.gateway(hedge_drafters=str(hedged).lower(), draft_timeout_ms="3000")

    def stop(told: Told) -> bool:
        if told.num_tokens() >= STOP_AFTER:
            first.signal(signal.SIGSTOP)
        return False

    wait_until(
        lambda: gateway.metric('outrider:fleet_members{service="drafter"}') == 2, START_TIMEOUT_S, "both drafters"
    )
    async with gateway.client() as http:
        quiet = await complete(http, BODY)  # from here on it is known how long an answer takes
        while (await drafter_info(first)).num_sessions:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        try:
            told = await read_events(http, "POST", "/v1/completions", body={**BODY, "stream": True}, until=stop)
        finally:
            first.signal(signal.SIGCONT)
    assert told.done
    assert tuple(told.token_ids()) == quiet.token_ids
    assert "accepted" in origins(told)[:STOP_AFTER]
    assert ("accepted" in origins(told)[-NUM_LAST_TOKENS:]) == hedged
    assert (gateway.metric("outrider:draft_timeouts_total") > 0) != hedged
    assert (gateway.metric("outrider:draft_hedges_won_total") > 0) == hedged
