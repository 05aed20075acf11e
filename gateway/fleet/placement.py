"""Chooses the verifier that decodes a session: the one likely to have the prompt's prefix cached, unless it is busy.

Rendezvous hashing: every verifier has a score per prompt prefix and the highest wins. When a verifier joins or leaves,
only sessions that it wins or had won move, and gateways agree without communicating.

Not here: the fleet's members and their load (pool.py).
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Collection, Sequence

from outrider.gateway.fleet.pool import Member, Pool
from outrider.gateway.fleet.verifier_kinds import kind_of, show
from outrider.gateway.request.types import ValidRequest
from outrider.shared.errors import Unavailable, VerifierLost
from outrider.shared.messages import VerifierInfo

# prompt tokens; the prefix that is hashed; chosen: system prompts and few-shot examples differ within it
PREFIX_LEN = 256
# ratio and sessions; the affine verifier is skipped beyond the least loaded one's sessions times the first plus the
# second; efef725
LOAD_FACTOR, LOAD_MARGIN = 1.5, 4
# s; longest wait between two checks of the fleet; chosen: below WATCH_INTERVAL_S
_LOOK_AGAIN_S = 0.25


def place(
    members: Sequence[Member[VerifierInfo]], prompt_token_ids: Sequence[int], cache_salt: str
) -> Member[VerifierInfo]:
    """Returns one of `members`, which must not be empty."""
    beginning = prompt_token_ids[:PREFIX_LEN]
    key = cache_salt.encode() + b"\0" + struct.pack(f"<{len(beginning)}I", *beginning)
    affine = max(members, key=lambda member: _score(key, member.address))
    least = min(members, key=load)
    return affine if load(affine) <= LOAD_FACTOR * load(least) + LOAD_MARGIN else least


def load(member: Member[VerifierInfo]) -> int:
    """Returns the number of sessions there: this gateway's, now, or all gateways', at the last poll; the larger."""
    return max(member.num_sessions, member.info.num_sessions if member.info is not None else 0)


def _score(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(address.encode() + b"\0" + key, digest_size=8).digest()


async def acquire_verifier(
    verifiers: Pool[VerifierInfo],
    request: ValidRequest,
    *,
    numerics: str | None = None,
    full: Collection[str],
    lost: VerifierLost | None,
    patience_s: float,
) -> Member[VerifierInfo]:
    """Reserves a session slot; the caller releases it with `num_sessions -= 1`. Raises Unavailable on timeout.

    numerics: only verifiers of this kind; None: any (verifier_kinds.py). full: addresses that refused just now, used
    only if no others are left. lost: why the session needs a new verifier.
    """
    deadline = time.monotonic() + patience_s
    while True:
        healthy = [member for member in verifiers.healthy() if numerics is None or kind_of(member) == numerics]
        members = [member for member in healthy if member.address not in full] or healthy
        if members:
            member = place(members, request.prompt_token_ids, request.cache_salt)
            member.num_sessions += 1
            return member
        if time.monotonic() >= deadline:
            raise Unavailable(_what_happened(verifiers, numerics, lost, patience_s))
        await verifiers.wait_for_change(_LOOK_AGAIN_S)


def _what_happened(
    verifiers: Pool[VerifierInfo], numerics: str | None, lost: VerifierLost | None, patience_s: float
) -> str:
    before = f"the verifier was lost ({lost.message}) and " if lost is not None else ""
    others = sorted({kind_of(member) for member in verifiers.healthy()})
    if numerics is not None and others:
        return (
            f"{before}no verifier with numerics {show(numerics)} served within {patience_s:g} s (--failover-s); "
            f"others have {', '.join(map(show, others))}, where exact output may differ; try again later"
        )
    known = ", ".join(member.address for member in verifiers.members) or "none"
    return f"{before}no verifier served within {patience_s:g} s (--failover-s); known: {known}; try again later"
