"""The product reads clocks and random numbers through their modules, where the simulation takes them over."""

from __future__ import annotations

import ast
import asyncio
import random
import time
from pathlib import Path

import pytest

from outrider.v1 import verifier_pb2 as pb
from tests.simulation.loop import SimLoop, StandsStill
from tests.simulation.older_wire import clipped
from tests.simulation.seams import EPOCH_S, taken_over
from tests.simulation.world import simulate

ROOT = Path(__file__).parents[2]
PACKAGES = ("gateway", "shared", "verifier_service", "drafter_service")
MODULES = {"time", "random", "secrets", "uuid", "os"}
TAKEN_OVER = {"time", "monotonic", "perf_counter", "sleep", "urandom", "uuid4", "token_hex", "token_bytes", "randbits"}


def names_taken(source: str) -> list[str]:
    """What a module takes out of those that the simulation takes over, so that it would keep the real one."""
    return [
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and node.module in MODULES
        for alias in node.names
        if alias.name in TAKEN_OVER
    ]


@pytest.mark.parametrize("package", PACKAGES)
def test_no_clock_and_no_random_number_passes_by_the_seam(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    assert {str(path): names_taken(path.read_text()) for path in files if names_taken(path.read_text())} == {}


def test_the_check_sees_a_clock() -> None:
    assert names_taken("from time import monotonic\nfrom os import environ") == ["monotonic"]


def test_answers_name_one_version_whatever_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    digest = simulate(3).digest
    monkeypatch.setattr("outrider.gateway.servers.live_service.outrider_version", lambda: "12.34+unknown")
    assert simulate(3).digest == digest


def test_time_passes_at_once_and_steps_of_a_lane_keep_their_order() -> None:
    rng = random.Random(1)
    loop = SimLoop(rng)
    seen: list[tuple[str, float]] = []

    async def sleeper(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(100.0)
            seen.append((name, time.time() - EPOCH_S))

    async def both() -> None:
        await asyncio.gather(sleeper("a"), sleeper("b"))

    with taken_over(loop, rng):
        loop.run_until_complete(both())
    assert loop.time() == 300.0
    assert seen == [(name, pytest.approx(100.0 * place)) for place in (1, 2, 3) for name in ("a", "b")]
    with pytest.raises(StandsStill):
        loop.run_until_complete(asyncio.Event().wait())


def test_fields_that_came_later_are_gone() -> None:
    commit = pb.Commit(epoch=3, base_len=7, token_ids=[1, 2], next_draft=pb.NextDraft(method="ngram"), saved_us=-5)
    known = pb.Commit.FromString(clipped("outrider.v1.Commit", commit.SerializeToString()))
    assert known == pb.Commit(epoch=3, base_len=7, token_ids=[1, 2])


def test_fields_are_gone_within_messages_too() -> None:
    request = pb.VerifierRequest(step=pb.VerifyStep(base_len=7, auto_drafts=pb.AutoDrafts(max_num_draft_tokens=4)))
    known = pb.VerifierRequest.FromString(clipped("outrider.v1.VerifierRequest", request.SerializeToString()))
    assert known == pb.VerifierRequest(step=pb.VerifyStep(base_len=7))


def test_other_packages_have_one_version() -> None:
    assert clipped("grpc.health.v1.HealthCheckRequest", b"\n\x01a") == b"\n\x01a"
