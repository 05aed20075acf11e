"""Chooses the kind of verifier that exact requests use, in a fleet with more than one kind of arithmetic.

Exact mode's output depends on the arithmetic, so a request starts with one kind (VerifierInfo.numerics), stores it in
its record, and is decoded only by verifiers of that kind. In rejection mode every token follows the distribution of the
verifier that samples it, so those sessions may use any.

Not here: measuring the kind (engine/numerics.py), and the choice within a kind (placement.py).
"""

from __future__ import annotations

import logging
from collections import Counter

from outrider.gateway.fleet.pool import Member, Pool
from outrider.shared.messages import VerifierInfo

log = logging.getLogger(__name__)


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
        agree without communicating.
        """
        self._warn_if_mixed()
        if self._pinned:
            return self._pinned
        known = [member for member in self._verifiers.members if member.info is not None]
        healthy = [member for member in known if member.healthy]
        certified = [member for member in healthy if member.info is not None and member.info.certificate_holds]
        counts = Counter(map(kind_of, known))
        eligible = set(map(kind_of, certified or healthy or known))
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


def show(numerics: str) -> str:
    """Returns the kind as messages to people show it."""
    return numerics or "unreported"
