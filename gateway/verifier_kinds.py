"""Which kind of verifier exact requests go to, in a fleet that computes in more than one way.

Exact mode's bytes are a function of the arithmetic too, so a request begins with one kind (VerifierInfo.numerics),
keeps it in its record, and is only ever decoded by verifiers of that kind. In rejection mode every token follows the
law of the verifier that draws it, whichever it is, so those sessions may go anywhere.

Not here: measuring it (engine/numerics.py), and which verifier of the kind (placement.py).
"""

from __future__ import annotations

import logging
from collections import Counter

from gateway.pool import Member, Pool
from shared.messages import VerifierInfo

log = logging.getLogger(__name__)


class VerifierKinds:
    """pinned: the kind that all exact requests go to (--numerics); empty: the fleet's own majority."""

    def __init__(self, verifiers: Pool[VerifierInfo], pinned: str) -> None:
        self._verifiers = verifiers
        self._pinned = pinned
        self._told: tuple[str, ...] = ()

    def present(self) -> tuple[str, ...]:
        """Kinds that a healthy verifier has, sorted."""
        healthy = self._verifiers.healthy()
        return tuple(sorted({kind_of(member) for member in healthy}))

    def for_new_request(self) -> str | None:
        """The kind that an exact request begins with; None while no verifier has ever been reached.

        The most common one among those known, so that one odd machine does not draw all the traffic, and a fleet that
        is upgraded changes over once, in the middle. Members that are away for the moment count, or each restart would
        tip a near tie; but some member must be there, and sound in exact mode if any is. Ties: the smallest text.
        Gateways that see the same fleet agree without talking.
        """
        self._tell()
        if self._pinned:
            return self._pinned
        known = [member for member in self._verifiers.members if member.info is not None]
        healthy = [member for member in known if member.healthy]
        certified = [member for member in healthy if member.info is not None and member.info.certificate_holds]
        counts = Counter(map(kind_of, known))
        eligible = set(map(kind_of, certified or healthy or known))
        return min(eligible, key=lambda kind: (-counts[kind], kind), default=None)

    def _tell(self) -> None:
        """A warning, once each time that the fleet becomes mixed."""
        kinds = self.present()
        if len(kinds) > 1 and kinds != self._told:
            log.warning(
                "verifiers of different kinds (%s): exact requests go to one of them only; --numerics says to which",
                ", ".join(map(show, kinds)),
            )
        self._told = kinds


def kind_of(member: Member[VerifierInfo]) -> str:
    """Empty for a verifier of a version that does not tell: those are one kind of their own."""
    return member.info.numerics if member.info is not None else ""


def show(numerics: str) -> str:
    """For people."""
    return numerics or "untold"
