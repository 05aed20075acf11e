"""Verifiers of two kinds in one fleet: exact output keeps to the kind that it began with, whatever dies."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest
from e2e_gateways import Fleet, Gateway, Told, read_events
from e2e_processes import START_TIMEOUT_S, ServiceProcess, start_all, verifier_info, verifier_process
from e2e_rest import complete, speculation

from outrider.client.stack.commands import StackState
from outrider.gateway.fleet.placement import place
from outrider.gateway.fleet.pool import Member
from outrider.gateway.fleet.remote import RemoteVerifier
from outrider.shared.errors import VerifierLost
from outrider.shared.messages import SessionSpec, VerifierInfo, VerifyStep
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.redis_server import RedisServer

pytestmark = pytest.mark.storm
COMPLETIONS = "/v1/completions"
NUM_TOKENS = 400
KILL_AFTER = 20
PROMPT = [5, 9, 301, 44, 17]
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": NUM_TOKENS,
    "temperature": 0.9,
    "ignore_eos": True,
    "skip_special_tokens": False,
    **speculation("off", annotate=True),
}
EXACT = {**BODY, "seed": 7}


@dataclass
class Mixed:
    bfloat16: ServiceProcess
    float32: ServiceProcess
    fleet: Fleet


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mixed]:
    run_dir = tmp_path_factory.mktemp("mixed")
    verifiers = [verifier_process(run_dir, dtype) for dtype in ("bfloat16", "float32")]
    with RedisServer(run_dir) as redis:
        state = StackState(verifiers=[verifier.address for verifier in verifiers])
        fleet = Fleet(state, redis, run_dir)
        try:
            start_all(verifiers)
            yield Mixed(*verifiers, fleet)
        finally:
            fleet.close()
            for verifier in verifiers:
                verifier.kill()


@pytest.fixture(scope="module")
async def infos(mixed: Mixed) -> tuple[VerifierInfo, VerifierInfo]:
    return await verifier_info(mixed.bfloat16), await verifier_info(mixed.float32)


@pytest.fixture(scope="module")
def kinds(infos: tuple[VerifierInfo, VerifierInfo]) -> tuple[str, str]:
    """Of the bfloat16 and of the float32 verifier."""
    return infos[0].numerics, infos[1].numerics


@pytest.fixture(scope="module")
def impatient(mixed: Mixed) -> Gateway:
    return mixed.fleet.gateway(failover_s="5")


@pytest.fixture(scope="module")
async def http(impatient: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with impatient.client() as client:
        yield client


async def test_verifiers_tell_their_kind_and_refuse_sessions_of_another(mixed: Mixed, kinds: tuple[str, str]) -> None:
    assert kinds[0].startswith("bfloat16/cpu/cpu/tp1/")
    assert kinds[1].startswith("float32/cpu/cpu/tp1/")
    params = SamplingParams(temperature=0.0, max_tokens=1)
    async with grpc.aio.insecure_channel(mixed.bfloat16.address) as channel:

        async def verify_once(numerics: str | None) -> list[int]:
            verifier = RemoteVerifier(channel, mixed.bfloat16.address)
            await verifier.open(SessionSpec("s", 0, (5,), (), params, SpeculationMode.EXACT, 1, numerics=numerics))
            try:
                return [len(commit.token_ids) async for commit in verifier.verify(VerifyStep(0, 0))]
            finally:
                await verifier.close()

        for numerics in (None, kinds[0]):
            assert await verify_once(numerics) == [1]
        for numerics in (kinds[1], ""):
            with pytest.raises(VerifierLost, match=rf"UNAVAILABLE .*{numerics or 'unreported'}.*{kinds[0]}"):
                await verify_once(numerics)


async def test_exact_requests_all_go_to_one_kind(
    mixed: Mixed, impatient: Gateway, http: httpx.AsyncClient, kinds: tuple[str, str]
) -> None:
    pinned = [mixed.fleet.gateway(numerics=kind) for kind in kinds]
    bodies = [{**EXACT, "prompt": [*PROMPT, place], "max_tokens": 40} for place in range(6)]
    outputs: list[list[tuple[int, ...]]] = []
    for gateway in (impatient, *pinned):
        async with gateway.client() as client:
            outputs.append([(await complete(client, body)).token_ids for body in bodies])
    assert outputs[0] == outputs[1], "one each: the smaller text decides"
    assert outputs[0] != outputs[2], "the kinds do differ"
    assert impatient.metric("outrider:verifier_kinds") == 2
    log = mixed.fleet.run_dir.joinpath("gateway-0.log").read_text()
    # Once each time that the fleet becomes mixed: again after a verifier that was held up is back.
    assert 1 <= log.count("verifiers of different kinds") <= 1 + log.count("is gone")


def salt_that_leads_to(verifier: ServiceProcess, infos: tuple[VerifierInfo, VerifierInfo], mixed: Mixed) -> str:
    """A cache salt whose sessions begin at this verifier while nothing else runs."""
    addresses = (mixed.bfloat16.address, mixed.float32.address)
    members = [
        Member(address, grpc.aio.insecure_channel(address), info, healthy=True)
        for address, info in zip(addresses, infos, strict=True)
    ]
    salts = (f"salt-{number}" for number in range(1000))
    return next(salt for salt in salts if place(members, PROMPT, salt).address == verifier.address)


def cutting(cut: Callable[[], None]) -> Callable[[Told], bool]:
    """Calls `cut` once, when enough was read, and reads on."""
    called: list[bool] = []

    def check(told: Told) -> bool:
        if told.num_tokens() >= KILL_AFTER and not called:
            called.append(True)
            cut()
        return False

    return check


async def test_an_exact_stream_waits_for_its_kind_and_one_in_rejection_mode_moves(
    mixed: Mixed,
    impatient: Gateway,
    http: httpx.AsyncClient,
    infos: tuple[VerifierInfo, VerifierInfo],
    kinds: tuple[str, str],
) -> None:
    """Both run at the bfloat16 verifier when it is killed; the float32 one stays."""
    quiet = await complete(http, EXACT)
    free = {**BODY, "stream": True, "cache_salt": salt_that_leads_to(mixed.bfloat16, infos, mixed)}
    both_read = asyncio.Barrier(2)
    killed = asyncio.Event()

    async def kill_together() -> None:
        await both_read.wait()
        if not killed.is_set():
            killed.set()
            mixed.bfloat16.kill()

    tasks: list[asyncio.Task[None]] = []

    def cut() -> None:
        tasks.append(asyncio.create_task(kill_together()))

    exact, moved = await asyncio.gather(
        read_events(http, "POST", COMPLETIONS, body={**EXACT, "stream": True}, until=cutting(cut)),
        read_events(http, "POST", COMPLETIONS, body=free, until=cutting(cut)),
    )
    await asyncio.gather(*tasks)
    assert moved.done
    assert moved.num_tokens() == NUM_TOKENS
    # One each; a session whose write met the end of the stream looks once more whether the verifier is dead.
    assert impatient.metric("outrider:verifier_failovers_total") >= 2

    assert exact.error is not None
    for part in (*kinds, "--failover-s"):
        assert part in exact.error["message"]
    read = exact.token_ids()
    assert KILL_AFTER <= len(read) < NUM_TOKENS
    assert tuple(read) == quiet.token_ids[: len(read)]

    again = await read_events(http, "POST", COMPLETIONS, last_event_id=exact.last_id)
    assert again.error is not None, "resuming does not change the kind either"
    assert kinds[0] in again.error["message"]

    patient = mixed.fleet.gateway(failover_s=str(START_TIMEOUT_S))
    async with patient.client() as client:
        rest = asyncio.create_task(read_events(client, "POST", COMPLETIONS, last_event_id=exact.last_id))
        await asyncio.sleep(1.0)
        assert not rest.done()
        mixed.bfloat16.start()
        whole = exact + await rest
    assert whole.done
    assert tuple(whole.token_ids()) == quiet.token_ids
