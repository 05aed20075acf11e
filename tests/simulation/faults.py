"""Which faults a seed has: of links, message by message, and of processes, at drawn times.

All faults are over at `until_s`; afterwards every request must be answered.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from tests.simulation.links import Link, Network

LINK_FAULTS = ("stall", "reset", "half-open")
REDIS_FAULTS = ("redis-power", "rack-power", "redis-full", "scripts")
CHANGES = ("upgrade", "new-keys")
_MISHAPS = (*REDIS_FAULTS, "kill", "power", "pause", "clock", "no-drafters")
PROCESS_FAULTS = (*_MISHAPS, *CHANGES)
# What seeds of before CHANGES were drawn from.
MISHAPS = (*LINK_FAULTS, *_MISHAPS)
ALL_FAULTS = (*MISHAPS, *CHANGES)
# seconds of virtual time; faults begin before the first, while most requests run; all are over at the second
BEGIN_BEFORE_S, UNTIL_S = 3.0, 12.0
# Messages that are sent after another fault only; and the share of them that something happens to: two faults at one
# request would hardly ever meet otherwise.
_RARE_MESSAGES = ("RESTORE", "CLAIM")
_RARE_SHARE = 0.3
# Share of messages, and how many of them, in which one process meets another fault after a fault of its link.
_BURST_SHARE, _BURST_LEN = 0.1, 10
# What a fault of a process may strike behind, within seconds; "": any time. A rare message lasts some milliseconds of
# the seconds that faults are spread over.
_MOMENTS, _BEHIND_S = ("", "", "APPEND", "CLAIM", "RESTORE"), 0.02


@dataclass(frozen=True)
class ProcessFault:
    """kind: of PROCESS_FAULTS; "rack-power": Redis and a gateway lose power together; "upgrade": a process starts again
    with the other version of the wire (older_wire.py); "new-keys": clients' API key is replaced. victim: its place
    among the processes. lasts_s: until it is over. after: it strikes right behind the first message of this name that
    is sent from at_s on; "": at at_s.
    """

    at_s: float
    kind: str
    victim: int
    lasts_s: float
    amount: float
    after: str = ""


class Faults:
    """A seed's faults. kinds: those that may happen. without: the numbers of faults that are left out."""

    def __init__(self, rng: random.Random, kinds: tuple[str, ...], without: frozenset[int] = frozenset()) -> None:
        self._rng = rng
        enabled = rng.sample(kinds, min(len(kinds), rng.randint(1, 4)))
        links = [kind for kind in enabled if kind in LINK_FAULTS]
        processes = [kind for kind in enabled if kind in PROCESS_FAULTS]
        self.enabled = frozenset(enabled)
        self.until_s = UNTIL_S
        self.is_over = not enabled
        self.done: dict[int, tuple[str, str]] = {}  # kind and place, by number
        self._without = without
        self._num = 0
        # share of messages that something happens to
        self._link_share = rng.choice([0.002, 0.01, 0.03]) if links else 0.0
        self._links = links
        self._in_burst: dict[str, int] = {}  # messages left, by process
        self._armed: list[ProcessFault] = []
        num = rng.randint(1, 5) if processes else 0
        self.processes = sorted(
            (
                ProcessFault(
                    rng.uniform(0.0, BEGIN_BEFORE_S),
                    rng.choice(processes),
                    rng.randrange(1000),
                    rng.choice([0.2, 2.0, 5.0]) * rng.random(),
                    rng.random(),
                    rng.choice(_MOMENTS),
                )
                for _ in range(num)
            ),
            key=lambda fault: fault.at_s,
        )

    def on_message(self, link: Link, what: object) -> float:
        if self.is_over:
            return 0.0
        if self._armed and isinstance(what, str):
            self._set_off(what)
        if not self._links:
            return 0.0
        share = _RARE_SHARE if isinstance(what, str) and what.startswith(_RARE_MESSAGES) else self._link_share
        sender = link.client.process.name
        if left := self._in_burst.get(sender, 0):
            self._in_burst[sender] = left - 1
            share = max(share, _BURST_SHARE)
        if self._rng.random() >= share:
            return 0.0
        self._in_burst.setdefault(sender, _BURST_LEN)
        kind = self._rng.choice(self._links)
        if not self.begins(kind, link.kind):
            return 0.0
        if kind == "reset":
            link.reset()
        elif kind == "half-open":
            link.half_open()
        else:
            return self._rng.choice([0.05, 0.5, 3.0]) * self._rng.random()
        return 0.0

    def arm(self, net: Network, strike: Callable[[ProcessFault], None]) -> None:
        """Lets the faults of processes happen, each at its time or behind its message."""
        self._net, self._strike = net, strike
        for fault in self.processes:
            act = self._armed.append if fault.after else strike
            net.later(fault.at_s, partial(act, fault))

    def _set_off(self, what: str) -> None:
        for fault in [fault for fault in self._armed if what.startswith(fault.after)]:
            self._armed.remove(fault)
            self._net.later(self._net.loop.time() + self._rng.uniform(0.0, _BEHIND_S), partial(self._strike, fault))

    def begins(self, kind: str, where: str) -> bool:
        """Counts a fault; False if it is left out."""
        number = self._num
        self._num += 1
        if number in self._without:
            return False
        self.done[number] = kind, where
        return True
