"""Sessions while verifiers take other weights of the target: where they open, and when they end by name."""

from __future__ import annotations

import dataclasses

import pytest
from verifier_fleet import Fleet, members_with, verifier_info

from outrider.gateway.fleet.placement import VerifierKinds, acquire_verifier, kind_for
from outrider.gateway.request.types import ValidRequest
from outrider.shared.errors import TargetReplaced, Unavailable
from outrider.shared.messages import VerifierInfo, of_other_weights, weights_of
from outrider.shared.sampling_params import SamplingParams

OLD, NEW = "bfloat16/cpu/cpu/tp1/aa/weights-01", "bfloat16/cpu/cpu/tp1/bb/weights-02"
OLD_ON_GPU = "bfloat16/cuda/triton/tp1/cc/weights-01"
REQUEST = ValidRequest("r", (1, 2, 3), SamplingParams())


def draining(old: str = OLD, new: str = NEW) -> VerifierInfo:
    return dataclasses.replace(verifier_info(numerics=old), next_numerics=new)


class Polled(Fleet):
    """look_again finds what `found` says."""

    def __init__(self, *infos: VerifierInfo, found: VerifierInfo | None = None) -> None:
        super().__init__(members_with(*infos))
        self.found, self.num_looks = found, 0

    async def look_again(self) -> None:
        self.num_looks += 1
        for member in self.members:
            member.info = self.found or member.info


async def chosen(fleet: Fleet, **wanted: str) -> set[str]:
    taken = [await acquire_verifier(fleet, REQUEST, full=(), lost=None, patience_s=0.1, **wanted) for _ in range(12)]  # type: ignore[arg-type]
    return {member.address for member in taken}


def test_the_weights_of_a_kind() -> None:
    assert weights_of(OLD) == "01"
    assert weights_of("bfloat16/cpu/cpu/tp1/aa") == weights_of("") == weights_of(None) == ""
    assert of_other_weights(OLD, NEW)
    assert not of_other_weights(OLD, OLD_ON_GPU)
    assert not of_other_weights("bfloat16/cpu/cpu/tp1/aa", NEW)


async def test_new_requests_go_where_nothing_changes_and_else_wait_for_the_new_weights() -> None:
    fleet = Fleet(members_with(draining(), verifier_info(numerics=OLD)))
    assert VerifierKinds(fleet, "").for_new_request() == OLD
    assert await chosen(fleet, numerics=OLD) == {fleet.members[1].address}
    fleet.members[0].info = verifier_info(numerics=NEW)
    fleet.members[1].info = draining()
    assert VerifierKinds(fleet, "").for_new_request() == NEW
    assert await chosen(fleet, numerics=NEW) == {fleet.members[0].address}
    alone = Fleet(members_with(draining()))
    assert VerifierKinds(alone, "").for_new_request() == NEW
    assert await chosen(alone, numerics=NEW) == {alone.members[0].address}
    assert kind_for(alone.members[0], NEW) == NEW
    assert kind_for(alone.members[0], None) == NEW


async def test_a_session_moves_to_a_verifier_that_has_its_weights_still() -> None:
    fleet = Fleet(members_with(verifier_info(numerics=NEW), draining()))
    assert await chosen(fleet, numerics=OLD) == {fleet.members[1].address}
    assert kind_for(fleet.members[1], OLD) == OLD
    both = Fleet(members_with(draining(), verifier_info(numerics=OLD)))
    assert await chosen(both, numerics=OLD) == {both.members[1].address}


async def test_in_rejection_mode_other_arithmetic_will_do_and_other_weights_will_not() -> None:
    fleet = Fleet(members_with(verifier_info(numerics=NEW), verifier_info(numerics=OLD_ON_GPU), draining()))
    weights = weights_of(OLD)
    assert await chosen(fleet, weights=weights) == {fleet.members[1].address}
    assert kind_for(fleet.members[0], None, weights) is None
    assert kind_for(fleet.members[1], None, weights) == OLD_ON_GPU
    assert kind_for(fleet.members[2], None, weights) == OLD


@pytest.mark.parametrize("wanted", [{"numerics": OLD}, {"weights": weights_of(OLD)}])
async def test_weights_that_nobody_has_end_a_session_at_once(wanted: dict[str, str]) -> None:
    fleet = Polled(verifier_info(numerics=NEW), verifier_info(numerics=NEW))
    with pytest.raises(TargetReplaced, match="served no more"):
        await chosen(fleet, **wanted)
    assert fleet.num_looks == 1
    later = Polled(verifier_info(numerics=NEW), found=verifier_info(numerics=OLD))
    assert len(await chosen(later, **wanted)) == 1, "another gateway may have heard of them earlier"


async def test_a_verifier_that_is_away_may_come_back_with_its_weights() -> None:
    fleet = Polled(verifier_info(numerics=NEW), verifier_info(numerics=OLD))
    fleet.mark_lost(fleet.members[1])
    with pytest.raises(Unavailable, match="no verifier with numerics") as raised:
        await chosen(fleet, numerics=OLD)
    assert not isinstance(raised.value, TargetReplaced)
    assert fleet.num_looks == 0
