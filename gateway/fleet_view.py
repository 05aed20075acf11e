"""The fleet as GET /fleet shows it: who is there, is it well, what does it hold.

Not here: how it is watched (pool.py) and who may look (http_admission.py: whoever may send requests).
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import TypedDict

from gateway.pool import Member
from shared.messages import DrafterInfo, DraftMethodInfo, VerifierInfo


class MethodView(TypedDict):
    name: str
    model: str


class VerifierView(TypedDict):
    """What a verifier said last; all but its address is empty, or 0, before it has been reached once. `methods`: what
    it drafts with by itself.
    """

    address: str
    healthy: bool
    model: str
    device: str
    dtype: str
    num_sessions: int
    max_sessions: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    methods: list[MethodView]


class DrafterView(TypedDict):
    """As VerifierView."""

    address: str
    healthy: bool
    num_sessions: int
    max_sessions: int
    methods: list[MethodView]


class GatewayView(TypedDict):
    """`num_running`: sessions that this gateway is decoding, from both doors."""

    num_running: int


class FleetView(TypedDict):
    """`model`: the name that requests use, null while no verifier has been reached."""

    version: str
    model: str | None
    verifiers: list[VerifierView]
    drafters: list[DrafterView]
    gateway: GatewayView


def fleet_view(
    version: str,
    model: str | None,
    verifiers: Sequence[Member[VerifierInfo]],
    drafters: Sequence[Member[DrafterInfo]],
) -> FleetView:
    return {
        "version": version,
        "model": model,
        "verifiers": [_verifier(member) for member in verifiers],
        "drafters": [_drafter(member) for member in drafters],
        "gateway": {"num_running": sum(member.num_sessions for member in verifiers)},
    }


def _verifier(member: Member[VerifierInfo]) -> VerifierView:
    info = member.info
    return {
        "address": member.address,
        "healthy": member.healthy,
        "model": info.model if info else "",
        "device": info.device if info else "",
        "dtype": info.dtype if info else "",
        "num_sessions": _num_sessions(member),
        "max_sessions": info.max_sessions if info else 0,
        "num_waiting": info.num_waiting if info else 0,
        "num_blocks": info.num_blocks if info else 0,
        "num_free_blocks": info.num_free_blocks if info else 0,
        "methods": _methods(info.local_methods if info else ()),
    }


def _drafter(member: Member[DrafterInfo]) -> DrafterView:
    info = member.info
    return {
        "address": member.address,
        "healthy": member.healthy,
        "num_sessions": _num_sessions(member),
        "max_sessions": info.max_sessions if info else 0,
        "methods": _methods(info.methods if info else ()),
    }


def _methods(methods: Sequence[DraftMethodInfo]) -> list[MethodView]:
    return [{"name": method.name, "model": method.model} for method in methods]


def _num_sessions(member: Member[VerifierInfo] | Member[DrafterInfo]) -> int:
    """This gateway's own, counted now, or all gateways', counted at the last look; one that is gone holds none."""
    if not member.healthy or member.info is None:
        return 0
    return max(member.num_sessions, member.info.num_sessions)
