"""In a fleet of several kinds, exact requests all begin with one, and the same one at every gateway."""

from __future__ import annotations

import logging
import random

import pytest
from verifier_fleet import Fleet, members_with, verifier_info

from outrider.gateway.fleet.placement import VerifierKinds

A, B, C = "bfloat16/cpu/cpu/tp1/aa", "bfloat16/cpu/cpu/tp1/bb", "float32/cpu/cpu/tp1/00"


def fleet_of(*kinds: str) -> Fleet:
    return Fleet(members_with(*(verifier_info(numerics=kind) for kind in kinds)))


def kinds_of(fleet: Fleet, pinned: str = "") -> VerifierKinds:
    return VerifierKinds(fleet, pinned)


@pytest.mark.parametrize(
    ("fleet", "expected"),
    [
        ([], None),
        ([A], A),
        ([A, B, B], B),
        ([B, A], A),
        ([C, B, A, C, B], B),
        (["", "", A], ""),
        (["", A], ""),
        (["", A, A], A),
    ],
    ids=lambda value: str(value),
)
async def test_the_most_common_kind_is_taken_and_the_order_does_not_matter(
    fleet: list[str], expected: str | None
) -> None:
    for seed in range(5):
        shuffled = random.Random(seed).sample(fleet, len(fleet))
        assert kinds_of(fleet_of(*shuffled)).for_new_request() == expected


async def test_a_member_that_is_away_still_counts_but_its_kind_must_be_there() -> None:
    fleet = fleet_of(B, B, A, A, B)
    kinds = kinds_of(fleet)
    gone = [member for member in fleet.members if member.info is not None and member.info.numerics == B]
    for member in gone:
        assert kinds.for_new_request() == B
        fleet.mark_lost(member)
    assert kinds.for_new_request() == A
    for member in fleet.members:
        fleet.mark_lost(member)
    assert kinds.for_new_request() == B, "nobody is there: what it will most probably be again"


async def test_an_upgrade_member_by_member_changes_over_once() -> None:
    fleet = fleet_of(*[A] * 5)
    kinds = kinds_of(fleet)
    chosen = []
    for member in fleet.members:
        fleet.mark_lost(member)
        chosen.append(kinds.for_new_request())
        member.info = verifier_info(numerics=B)
        member.healthy = True
        chosen.append(kinds.for_new_request())
    assert chosen == [A] * 5 + [B] * 5


async def test_a_kind_that_is_not_sound_in_exact_mode_is_passed_over() -> None:
    rows = [verifier_info(numerics=A, certificate_holds=False)] * 2
    assert kinds_of(Fleet(members_with(*rows, verifier_info(numerics=B)))).for_new_request() == B
    assert kinds_of(Fleet(members_with(*rows))).for_new_request() == A


async def test_the_setting_pins_a_kind_whoever_is_there() -> None:
    for fleet in (fleet_of(), fleet_of(A), fleet_of(A, A, C)):
        assert kinds_of(fleet, pinned=C).for_new_request() == C


async def test_a_mixed_fleet_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    fleet = fleet_of(A, A)
    kinds = kinds_of(fleet)
    with caplog.at_level(logging.WARNING, "outrider.gateway.fleet.placement"):
        kinds.for_new_request()
        assert caplog.messages == []
        assert kinds.present() == (A,)
        fleet.members[0].info = verifier_info()
        for _ in range(3):
            kinds.for_new_request()
        assert kinds.present() == ("", A)
        fleet.members[0].info = verifier_info(numerics=A)
        kinds.for_new_request()
        fleet.members[1].info = verifier_info(numerics=B)
        kinds.for_new_request()
    assert len(caplog.messages) == 2
    assert f"unreported, {A}" in caplog.messages[0]
    assert f"{A}, {B}" in caplog.messages[1]
