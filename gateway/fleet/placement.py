"""Chooses the verifier that decodes a session: the one likely to have the prompt's prefix cached, unless it is busy.

Rendezvous hashing: every verifier has a score per prompt prefix and the highest wins. When a verifier joins or leaves,
only sessions that it wins or had won move, and gateways agree without communicating.

Exact mode's output depends on the arithmetic. In a fleet with more than one kind of it (VerifierInfo.numerics) a
request starts with one kind, stores it in its record, and is decoded only by verifiers of that kind. In rejection mode
every token follows the distribution of the verifier that samples it, so those sessions may use any. Where weights can
be replaced while serving, the kind names them too, and no session of either mode goes on with other weights.

Not here: the fleet's members and their load (pool.py), and measuring the kind (engine/numerics.py).
"""

from __future__ import annotations

import hashlib
import logging
import struct
import time
from collections import Counter
from collections.abc import Collection, Sequence

from outrider.gateway.fleet.pool import Member, Pool
from outrider.gateway.request.types import ValidRequest
from outrider.shared.errors import TargetReplaced, Unavailable, VerifierLost
from outrider.shared.messages import VerifierInfo, weights_of

log = logging.getLogger(__name__)

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
    weights: str = "",
    full: Collection[str],
    lost: VerifierLost | None,
    patience_s: float,
) -> Member[VerifierInfo]:
    """Reserves a session slot; the caller releases it with `num_sessions -= 1`. Raises Unavailable on timeout, and
    TargetReplaced as soon as no verifier is known that has the weights.

    numerics: only verifiers of this kind, or about to be; None: any (VerifierKinds). weights: only those of these
    weights. full: addresses that refused just now, used only if no others are left. lost: why the session needs a new
    verifier.
    """
    deadline = time.monotonic() + patience_s
    while True:
        healthy = [member for member in verifiers.healthy() if kind_for(member, numerics, weights) is not None]
        healthy = [member for member in healthy if not _is_draining(member)] or healthy
        members = [member for member in healthy if member.address not in full] or healthy
        if members:
            member = place(members, request.prompt_token_ids, request.cache_salt)
            member.num_sessions += 1
            return member
        await _require_weights(verifiers, weights or weights_of(numerics))
        if time.monotonic() >= deadline:
            raise Unavailable(_what_happened(verifiers, numerics, lost, patience_s))
        await verifiers.wait_for_change(_LOOK_AGAIN_S)


async def _require_weights(verifiers: Pool[VerifierInfo], weights: str) -> None:
    """Raises TargetReplaced unless a verifier has these weights, or one has never been reached; empty: any will do."""

    def may_come() -> bool:
        known = [kind for member in verifiers.members for kind in _kinds(member)]
        return not known or verifiers.has_unseen or weights in map(weights_of, known)

    if weights and not may_come():
        await verifiers.look_again()  # another gateway may have heard of them earlier
        if not may_come():
            raise TargetReplaced(
                "the weights that this answer was begun with are served no more, and it is not continued on others; "
                "send the request again"
            )


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


class VerifierKinds:
    """The verifiers' kinds. pinned: the kind for all exact requests (--numerics); empty: the most common one."""

    def __init__(self, verifiers: Pool[VerifierInfo], pinned: str) -> None:
        self._verifiers = verifiers
        self._pinned = pinned
        self._reported: tuple[str, ...] = ()

    def present(self) -> tuple[str, ...]:
        """Returns the kinds of the healthy verifiers, sorted."""
        healthy = self._verifiers.healthy()
        return tuple(sorted({kind_of(member) for member in healthy}))

    def for_new_request(self) -> str | None:
        """Returns the kind for a new exact request; None while no verifier has ever been reached.

        The most common kind among known members: one odd machine does not attract all traffic, and an upgraded fleet
        changes over once, halfway. Unreachable members count, or each restart could tip a near tie, but a kind needs a
        healthy member, and one sound in exact mode if any is. Ties: the smallest text. Gateways that see the same fleet
        agree without communicating. A verifier whose weights are about to be replaced counts as of the coming kind, and
        is waited for only if there is no other.
        """
        self._warn_if_mixed()
        if self._pinned:
            return self._pinned
        known = [member for member in self._verifiers.members if member.info is not None]
        healthy = [member for member in known if member.healthy]
        certified = [member for member in healthy if member.info is not None and member.info.certificate.holds]
        choice = certified or healthy or known
        settled = [member for member in choice if not _is_draining(member)]
        counts = Counter(map(_coming_kind, known))
        eligible = set(map(_coming_kind, settled or choice))
        return min(eligible, key=lambda kind: (-counts[kind], kind), default=None)

    def _warn_if_mixed(self) -> None:
        """Logs a warning each time the fleet becomes mixed."""
        kinds = self.present()
        if len(kinds) > 1 and kinds != self._reported:
            log.warning(
                "verifiers of different kinds (%s): exact requests use only one of them, which --numerics selects",
                ", ".join(map(show, kinds)),
            )
        self._reported = kinds


def kind_of(member: Member[VerifierInfo]) -> str:
    """Returns the verifier's kind; empty for versions without this field, which are one kind."""
    return member.info.numerics if member.info is not None else ""


def kind_for(member: Member[VerifierInfo], numerics: str | None, weights: str = "") -> str | None:
    """Returns the kind that a session is opened as at this verifier; None: it does not fit.

    numerics, weights: that it needs; None or empty: any.
    """
    kinds = _kinds(member) if numerics is not None or weights else (_coming_kind(member),)
    fitting = (kind for kind in kinds if numerics in (None, kind) and weights in ("", weights_of(kind)))
    return next(fitting, None)


def _kinds(member: Member[VerifierInfo]) -> tuple[str, ...]:
    """Returns the kinds that sessions can have there, the coming one too; none before it has been reached."""
    info = member.info
    if info is None:
        return ()
    return (info.numerics, info.next_numerics) if info.next_numerics else (info.numerics,)


def _is_draining(member: Member[VerifierInfo]) -> bool:
    return member.info is not None and bool(member.info.next_numerics)


def _coming_kind(member: Member[VerifierInfo]) -> str:
    return kind_of(member) if member.info is None else member.info.next_numerics or member.info.numerics


def show(numerics: str) -> str:
    """Returns the kind as messages to people show it."""
    return numerics or "unreported"
