"""The fleet for GET /fleet: its members, their health and their load.

Not here: health checks (pool.py) and access (servers/http/admission.py: same as for requests).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import cast

from typing_extensions import TypedDict

from outrider.gateway.fleet.pool import Member
from outrider.shared.messages import DrafterInfo, DraftMethodInfo, VerifierInfo


class HeadView(TypedDict):
    """One of several heads of a method, and the drafts of the sessions that have ended with it."""

    name: str
    model: str
    version: int
    num_sessions: int
    num_drafts: int
    num_accepted_tokens: int


class MethodView(TypedDict):
    """version: of the weights, 1 for the first; 0 where they cannot be changed while serving. heads: where there are
    several for one target, else empty.
    """

    name: str
    model: str
    version: int
    heads: list[HeadView]


class VerifierView(TypedDict):
    """A verifier's last report; empty or 0 except for the address until first reached.

    numerics: its arithmetic, as receipts name it. target_version: of the target's weights, 0 where they cannot be
    replaced while serving; next_numerics: of those that take over soon, or empty. methods: those it drafts with in its
    own process. learning: the fields of shared.messages.Learning; null where they do not learn.
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
    block_size: int
    numerics: str
    target_version: int
    next_numerics: str
    methods: list[MethodView]
    learning: dict[str, int | float | str] | None


class DrafterView(TypedDict):
    """A drafter's last report; empty or 0 except for the address until first reached."""

    address: str
    healthy: bool
    num_sessions: int
    max_sessions: int
    methods: list[MethodView]


class GatewayView(TypedDict):
    """num_running: sessions that this gateway is decoding, over HTTP and gRPC. grpc_port: -1 without a gRPC server.
    failover_s: how long a session waits for a verifier.
    """

    num_running: int
    grpc_port: int
    failover_s: float


class FleetView(TypedDict):
    """model: the name used in requests, null while no verifier has been reached. warning: what does not
    work as configured, empty if all does.
    """

    version: str
    model: str | None
    verifiers: list[VerifierView]
    drafters: list[DrafterView]
    gateway: GatewayView
    warning: str


def fleet_view(
    version: str,
    model: str | None,
    verifiers: Sequence[Member[VerifierInfo]],
    drafters: Sequence[Member[DrafterInfo]],
    warning: str = "",
    grpc_port: int = -1,
    failover_s: float = 0.0,
) -> FleetView:
    return {
        "version": version,
        "model": model,
        "verifiers": [_verifier(member) for member in verifiers],
        "drafters": [_drafter(member) for member in drafters],
        "gateway": {
            "num_running": sum(member.num_sessions for member in verifiers),
            "grpc_port": grpc_port,
            "failover_s": failover_s,
        },
        "warning": warning,
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
        "block_size": info.block_size if info else 0,
        "numerics": info.numerics if info else "",
        "target_version": info.target_version if info else 0,
        "next_numerics": info.next_numerics if info else "",
        "methods": _methods(info.local_methods if info else ()),
        "learning": dataclasses.asdict(info.learning) if info and info.learning else None,
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
    return [
        {
            "name": method.name,
            "model": method.model,
            "version": method.version,
            "heads": [cast(HeadView, dataclasses.asdict(head)) for head in method.heads],
        }
        for method in methods
    ]


def _num_sessions(member: Member[VerifierInfo] | Member[DrafterInfo]) -> int:
    """Returns the number of sessions: this gateway's, now, or all gateways', at the last poll; 0 for a lost member."""
    if not member.healthy or member.info is None:
        return 0
    return max(member.num_sessions, member.info.num_sessions)
