"""Which verifier decodes a session: the one that has probably seen the beginning of its prompt, unless it is busy.

Rendezvous hashing: every verifier has a score per prompt beginning, the highest wins. When a verifier joins or leaves,
only the sessions that it wins or had won move, and gateways agree without talking to each other.

Not here: who is there and how loaded (pool.py).
"""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Collection, Sequence

from gateway.pool import Member, Pool
from gateway.requests import ValidRequest
from gateway.verifier_kinds import kind_of, show
from shared.errors import Unavailable, VerifierLost
from shared.messages import VerifierInfo

# System prompts and few-shot examples differ from each other within their first tokens.
PREFIX_LEN = 256
# The affine verifier is passed over when it has more sessions than this makes of the least loaded one's.
LOAD_FACTOR = 1.5
LOAD_MARGIN = 4
_LOOK_AGAIN_S = 0.25


def place(
    members: Sequence[Member[VerifierInfo]], prompt_token_ids: Sequence[int], cache_salt: str
) -> Member[VerifierInfo]:
    """One of `members`, which must not be empty."""
    beginning = prompt_token_ids[:PREFIX_LEN]
    key = cache_salt.encode() + b"\0" + struct.pack(f"<{len(beginning)}I", *beginning)
    affine = max(members, key=lambda member: _score(key, member.address))
    least = min(members, key=load)
    return affine if load(affine) <= LOAD_FACTOR * load(least) + LOAD_MARGIN else least


def load(member: Member[VerifierInfo]) -> int:
    """Sessions there: this gateway's own, counted now, or all gateways', counted at the last look."""
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
    """Takes a place; the caller gives it back by `num_sessions -= 1`. Raises Unavailable when none comes in time.

    numerics: only verifiers of this kind will do; None: any (verifier_kinds.py). full: addresses that had no place a
    moment ago; passed over while there are others. lost: why one is looked for again.
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
            f"{before}no verifier with numerics {show(numerics)} served within {patience_s:g} s (--failover-s); those "
            f"that do have {', '.join(map(show, others))}, where exact output may differ; try again later"
        )
    known = ", ".join(member.address for member in verifiers.members) or "none"
    return f"{before}no verifier served within {patience_s:g} s (--failover-s); known: {known}; try again later"
