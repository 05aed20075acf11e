"""Which drafter a session gets: a wanted method, that fits the target, at the least loaded member with a free place."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import grpc.aio
import pytest

from outrider.drafter_service.config import DrafterConfig
from outrider.drafting.methods.registry import build_methods
from outrider.gateway.fleet.drafter_choice import AUTO_ORDER, acquire_drafter, drafter_offers
from outrider.gateway.fleet.pool import Member, Pool
from outrider.shared.messages import DrafterInfo, DrafterOffer, DraftMethodInfo
from tests.gateway.verifier_fleet import verifier_info

TARGET = replace(verifier_info(), hidden_size=64, num_hidden_layers=4)
NGRAM = DraftMethodInfo("ngram")
SUFFIX = DraftMethodInfo("suffix")
MODEL = DraftMethodInfo("draft_model", vocab_size=100)
EAGLE = DraftMethodInfo("eagle3", vocab_size=100, hidden_layers=(1, 2, 4), hidden_size=64)


class Fleet(Pool[DrafterInfo]):
    """Members by hand instead of by name and health check; the channels lead nowhere and are never used."""

    def __init__(self, *served: tuple[DraftMethodInfo, ...]) -> None:
        super().__init__("drafter", (), _no_info)
        for place, methods in enumerate(served):
            address = f"10.0.0.{place}:7002"
            info = DrafterInfo("1", methods, 1, 0, 2)
            self._members[address] = Member(address, grpc.aio.insecure_channel(address), info, healthy=True)

    def loads(self) -> list[int]:
        return [member.num_sessions for member in self.members]


async def _no_info(channel: grpc.aio.Channel, timeout_s: float) -> DrafterInfo:
    raise NotImplementedError


@pytest.fixture
async def fleets() -> AsyncIterator[list[Fleet]]:
    made: list[Fleet] = []
    yield made
    for fleet in made:
        await fleet.close()


def make(fleets: list[Fleet], *served: tuple[DraftMethodInfo, ...]) -> Fleet:
    fleets.append(Fleet(*served))
    return fleets[-1]


async def test_the_least_loaded_is_taken_and_its_place_given_back(fleets: list[Fleet]) -> None:
    fleet = make(fleets, (NGRAM,), (NGRAM,), (NGRAM,))
    leases = [acquire_drafter("ngram", fleet, TARGET) for _ in range(7)]
    assert sorted(fleet.loads()) == [2, 2, 3]
    for lease in leases:
        assert lease is not None
        assert lease.method == NGRAM
        lease.release()
    assert fleet.loads() == [0, 0, 0]


async def test_a_method_by_name_is_that_method_or_none(fleets: list[Fleet]) -> None:
    fleet = make(fleets, (SUFFIX, NGRAM), (MODEL,))
    for name in ("ngram", "suffix", "draft_model"):
        lease = acquire_drafter(name, fleet, TARGET)
        assert lease is not None
        assert lease.method.name == name
    assert acquire_drafter("eagle3", fleet, TARGET) is None
    assert acquire_drafter("psychic", fleet, TARGET) is None
    assert fleet.loads() == [2, 1]


@pytest.mark.parametrize(
    ("served", "expected"),
    [
        ([(NGRAM,), (SUFFIX, MODEL), (EAGLE,)], "eagle3"),
        ([(NGRAM,), (SUFFIX, MODEL)], "draft_model"),
        ([(NGRAM, SUFFIX)], "suffix"),
        ([(NGRAM,)], "ngram"),
        ([], None),
        ([(DraftMethodInfo("psychic"),)], None),
    ],
    ids=["head", "model", "suffix", "ngram", "nobody", "unknown"],
)
async def test_auto_takes_the_best_method_that_is_served(
    fleets: list[Fleet], served: Sequence[tuple[DraftMethodInfo, ...]], expected: str | None
) -> None:
    lease = acquire_drafter("auto", make(fleets, *served), TARGET)
    assert (lease.method.name if lease is not None else None) == expected


async def test_auto_knows_every_method_that_a_drafter_can_serve() -> None:
    without_checkpoint = build_methods(DrafterConfig(), lambda _text: None)
    assert set(without_checkpoint) <= set(AUTO_ORDER)
    assert len(set(AUTO_ORDER)) == len(AUTO_ORDER) == 18  # eight with weights, alone and behind a lookup


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"vocab_size": 0}, True),
        ({"vocab_size": 101}, False),
        ({"hidden_size": 0}, True),
        ({"hidden_size": 32}, False),
        ({"hidden_layers": (0, 4)}, True),
        ({"hidden_layers": (5,)}, False),
    ],
    ids=str,
)
async def test_a_method_must_fit_the_target(fleets: list[Fleet], change: dict[str, object], fits: bool) -> None:
    method = replace(EAGLE, **change)  # type: ignore[arg-type]
    for wanted in ("eagle3", "auto"):
        fleet = make(fleets, (method, NGRAM))
        lease = acquire_drafter(wanted, fleet, TARGET)
        fallback = None if wanted == "eagle3" else "ngram"
        assert (lease.method.name if lease is not None else None) == ("eagle3" if fits else fallback)
        assert fleet.loads() == [1 if fits or fallback else 0]


async def test_a_method_is_offered_with_what_its_drafters_draft_at_most(fleets: list[Fleet]) -> None:
    heads = replace(EAGLE, max_num_draft_tokens=5, proposes_trees=True)
    short, unlimited = replace(heads, max_num_draft_tokens=3), replace(heads, max_num_draft_tokens=0)
    unfit = replace(heads, max_num_draft_tokens=1, vocab_size=7)
    ngram = replace(NGRAM, max_num_draft_tokens=32)
    fleet = make(fleets, (heads, ngram), (unlimited,), (short,), (unfit,), (SUFFIX,))
    offers = [("eagle3", 3), ("suffix", 0), ("ngram", 32)]
    assert drafter_offers(fleet, TARGET, token_tree=False) == tuple(DrafterOffer(*offer) for offer in offers)
    assert drafter_offers(fleet, TARGET, token_tree=True)[0] == DrafterOffer("eagle3", 0)


async def test_a_full_member_is_passed_over_for_the_same_method_first(fleets: list[Fleet]) -> None:
    fleet = make(fleets, (EAGLE,), (EAGLE,), (NGRAM,))
    full, other, _ = fleet.members
    assert full.info is not None
    full.info = replace(full.info, num_sessions=2)
    lease = acquire_drafter("auto", fleet, TARGET)
    assert lease is not None
    assert (lease.method.name, fleet.loads()) == ("eagle3", [0, 1, 0])
    other.healthy = False
    lease = acquire_drafter("auto", fleet, TARGET)
    assert lease is not None
    assert (lease.method.name, fleet.loads()) == ("ngram", [0, 1, 1])


async def test_before_the_target_is_known_everything_fits(fleets: list[Fleet]) -> None:
    assert acquire_drafter("eagle3", make(fleets, (replace(EAGLE, vocab_size=7),)), None) is not None
