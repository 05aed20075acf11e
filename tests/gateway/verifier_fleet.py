"""A fleet of verifiers by hand instead of by name and health check; the channels lead nowhere and are never used."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from outrider.gateway.fleet.pool import Member, Pool
from outrider.shared.messages import RowInvarianceCertificate, VerifierInfo


def verifier_info(num_sessions: int = 0, numerics: str = "", *, certificate_holds: bool = True) -> VerifierInfo:
    return VerifierInfo(
        model="demo",
        version="1",
        vocab_size=100,
        max_model_len=100,
        eos_token_ids=(),
        dtype="float32",
        device="cpu",
        hidden_size=1,
        num_hidden_layers=1,
        num_blocks=1,
        num_free_blocks=1,
        block_size=1,
        num_sessions=num_sessions,
        num_waiting=0,
        max_sessions=100,
        noise_version=1,
        certificate=RowInvarianceCertificate(certificate_holds),
        numerics=numerics,
    )


def members_with(*infos: VerifierInfo) -> list[Member[VerifierInfo]]:
    """Healthy ones, at 10.0.0.0, 10.0.0.1 and so on."""
    return [
        Member(f"10.0.0.{place}:7001", grpc.aio.insecure_channel(f"10.0.0.{place}:7001"), info, healthy=True)
        for place, info in enumerate(infos)
    ]


class Fleet(Pool[VerifierInfo]):
    def __init__(self, rows: Sequence[Member[VerifierInfo]]) -> None:
        super().__init__("verifier", (), _no_info)
        self._members = {row.address: row for row in rows}


async def _no_info(channel: grpc.aio.Channel, timeout_s: float) -> VerifierInfo:
    raise NotImplementedError
