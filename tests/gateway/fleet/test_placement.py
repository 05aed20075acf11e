"""Placement of sessions: sticky by the beginning of the prompt, moved little when the fleet changes, never queued."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import grpc.aio
import pytest
from verifier_fleet import Fleet, members_with, verifier_info

from outrider.gateway.fleet.placement import PREFIX_LEN, acquire_verifier, load, place
from outrider.gateway.fleet.pool import Member
from outrider.gateway.request.types import ValidRequest
from outrider.shared.errors import Unavailable, VerifierLost
from outrider.shared.messages import VerifierInfo
from outrider.shared.sampling_params import SamplingParams


async def members(*loads: int) -> list[Member[VerifierInfo]]:
    """Channels to nowhere are never used here."""
    return [
        Member(
            f"10.0.0.{place}:7001",
            grpc.aio.insecure_channel(f"10.0.0.{place}:7001"),
            verifier_info(),
            True,
            num_sessions,
        )
        for place, num_sessions in enumerate(loads)
    ]


def prompts(count: int) -> list[list[int]]:
    draw = random.Random(0)
    return [[draw.randrange(1000) for _ in range(40)] for _ in range(count)]


async def test_the_same_beginning_goes_to_the_same_verifier() -> None:
    fleet = await members(0, 0, 0)
    beginning = [7] * PREFIX_LEN
    chosen = {place(fleet, [*beginning, *end], "").address for end in prompts(50)}
    assert len(chosen) == 1
    assert len({place(fleet, [*beginning[1:], 8, *end], "").address for end in prompts(1)} | chosen) <= 2
    shuffled = random.Random(1).sample(fleet, 3)
    assert {place(shuffled, beginning, "").address} == chosen, "the order in which they were found does not matter"


async def test_prompts_and_salts_spread_over_the_fleet() -> None:
    fleet = await members(0, 0, 0)
    by_prompt = Counter(place(fleet, prompt, "").address for prompt in prompts(300))
    assert len(by_prompt) == 3
    assert min(by_prompt.values()) > 60
    by_salt = Counter(place(fleet, [1, 2, 3], f"tenant-{number}").address for number in range(300))
    assert min(by_salt.values()) > 60


async def test_one_that_leaves_moves_only_its_own() -> None:
    fleet = await members(0, 0, 0, 0)
    for prompt in prompts(200):
        before = place(fleet, prompt, "")
        after = place([member for member in fleet if member is not fleet[2]], prompt, "")
        assert after is before or before is fleet[2]


@pytest.mark.parametrize(
    ("affine_load", "least_load", "stays"), [(4, 0, True), (5, 0, False), (10, 4, True), (11, 4, False), (34, 20, True)]
)
async def test_a_busy_one_is_passed_over(affine_load: int, least_load: int, stays: bool) -> None:
    fleet = await members(least_load, least_load)
    prompt = prompts(1)[0]
    affine = place(fleet, prompt, "")
    affine.num_sessions = affine_load
    assert (place(fleet, prompt, "") is affine) == stays


async def test_the_sessions_of_other_gateways_count() -> None:
    [member] = await members(3)
    assert load(member) == 3
    member.info = verifier_info(num_sessions=9)
    assert load(member) == 9


# ---- waiting for one --------------------------------------------------------------------------------------------


REQUEST = ValidRequest("r", (1, 2, 3), SamplingParams())


async def test_one_that_said_it_was_full_is_asked_last() -> None:
    fleet = Fleet(await members(0, 0))
    first = await acquire_verifier(fleet, REQUEST, full=(), lost=None, patience_s=1)
    first.num_sessions -= 1
    second = await acquire_verifier(fleet, REQUEST, full={first.address}, lost=None, patience_s=1)
    assert second is not first
    assert second.num_sessions == 1
    full = {first.address, second.address}
    assert await acquire_verifier(fleet, REQUEST, full=full, lost=None, patience_s=1) in (first, second)


async def test_the_error_says_what_happened() -> None:
    rows = await members(0, 0)
    fleet = Fleet(rows)
    for row in rows:
        fleet.mark_lost(row)
    lost = VerifierLost("10.0.0.1:7001: UNAVAILABLE Socket closed")
    with pytest.raises(Unavailable) as raised:
        await acquire_verifier(fleet, REQUEST, full=(), lost=lost, patience_s=0.1)
    for part in (lost.message, "within 0.1 s (--failover-s)", "10.0.0.0:7001, 10.0.0.1:7001"):
        assert part in raised.value.message


async def test_one_that_comes_back_is_taken() -> None:
    [row] = await members(0)
    fleet = Fleet([row])
    fleet.mark_lost(row)
    waiting = asyncio.create_task(acquire_verifier(fleet, REQUEST, full=(), lost=None, patience_s=30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    row.healthy = True
    assert await asyncio.wait_for(waiting, 30) is row


# ---- a fleet of several kinds -----------------------------------------------------------------------------------

MINE, OTHER = "bfloat16/cpu/cpu/tp1/aa", "float32/cpu/cpu/tp1/bb"


async def test_an_exact_session_goes_to_its_own_kind_however_full_that_is() -> None:
    fleet = Fleet(members_with(*(verifier_info(numerics=kind) for kind in (OTHER, MINE, OTHER, ""))))
    mine = fleet.members[1]
    for _ in range(30):
        chosen = await acquire_verifier(fleet, REQUEST, numerics=MINE, full={mine.address}, lost=None, patience_s=1)
        assert chosen is mine
    anywhere = {(await acquire_verifier(fleet, REQUEST, full=(), lost=None, patience_s=1)).address for _ in range(30)}
    assert len(anywhere) == 3, "without a kind the load decides"
    unreported = await acquire_verifier(fleet, REQUEST, numerics="", full=(), lost=None, patience_s=1)
    assert unreported is fleet.members[3]


async def test_it_waits_for_its_kind_and_the_error_names_both() -> None:
    fleet = Fleet(members_with(verifier_info(numerics=MINE), verifier_info(numerics=OTHER), verifier_info()))
    mine, other, _ = fleet.members
    fleet.mark_lost(mine)
    lost = VerifierLost("10.0.0.0:7001: UNAVAILABLE Socket closed")
    with pytest.raises(Unavailable) as raised:
        await acquire_verifier(fleet, REQUEST, numerics=MINE, full=(), lost=lost, patience_s=0.1)
    for part in (lost.message, MINE, OTHER, "unreported", "within 0.1 s (--failover-s)"):
        assert part in raised.value.message
    waiting = asyncio.create_task(acquire_verifier(fleet, REQUEST, numerics=MINE, full=(), lost=lost, patience_s=30))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    other.info = verifier_info(numerics=MINE)
    assert await asyncio.wait_for(waiting, 30) is other
