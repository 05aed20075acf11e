"""How many outputs one caller may hold beside others, from what the verifiers say of their rounds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.gateway.admission.fair_starts import Room
from outrider.shared.messages import VerifierInfo
from tests.gateway.verifier_fleet import Fleet, members_with, verifier_info


def _room(*infos: VerifierInfo) -> Room:
    return Room(Fleet(members_with(*infos)))


def _verifier(*round_us: int, max_sessions: int = 64) -> VerifierInfo:
    return replace(verifier_info(), max_sessions=max_sessions, round_us=round_us)


FLAT = (20_000,) * 7
# A millisecond for each session and none for the round itself.
LINEAR = tuple(1000 << power for power in range(7))


@pytest.mark.parametrize(
    ("round_us", "num_others", "expected"),
    [
        (FLAT, 1, 32),  # half of the places, whatever a round takes
        (FLAT, 60, 32),
        (LINEAR, 8, 8),  # as many as the others
        (LINEAR, 5, 5),
        (LINEAR, 1, 1),
        (LINEAR, 63, 32),
        ((1000, 9000, 2000, 3000, 1000, 20_000, 40_000), 4, 25),  # a size that measures less is noise
        ((), 8, 32),  # an older verifier does not tell
        ((500,), 1, 32),
        ((8000, 8000, 8000, 8000, 8000, 16_000, 32_000), 1, 31),  # a round of 32 takes twice as long as one of 1
        ((8000, 8000, 8000, 8000, 8000, 16_000, 32_000), 16, 16),
        ((8000, 8000, 8000, 8000, 8000, 17_000, 34_000), 8, 22),  # between 16 and 32 it is a line
    ],
)
async def test_one_callers_outputs_make_the_rounds_of_others_at_most_twice_as_long(
    round_us: tuple[int, ...], num_others: int, expected: int
) -> None:
    assert _room(_verifier(*round_us)).max_per_caller(num_others) == expected


async def test_several_verifiers_share_the_outputs() -> None:
    room = _room(_verifier(*LINEAR), _verifier(*FLAT))
    assert room.num_places() == 128
    assert room.max_per_caller(8) == 4 + 60
    assert _room(_verifier(*LINEAR), _verifier(*LINEAR)).max_per_caller(8) == 8


async def test_without_a_verifier_nothing_is_known() -> None:
    room = _room()
    assert (room.num_places(), room.max_per_caller(3)) == (0, 1)


async def test_a_small_verifier_leaves_everybody_an_output() -> None:
    assert _room(_verifier(1000, max_sessions=1)).max_per_caller(0) == 1
