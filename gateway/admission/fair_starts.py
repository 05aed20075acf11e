"""Decides whose output starts next, so that one caller's many outputs do not hold up another caller's.

An output holds a place from its start to its end. There is one place for each session that the verifiers take; without
this queue the outputs beyond that would ask them again and again. A free place goes to the caller who holds fewest, in
turn among equals: max-min fairness, as in fair queueing. While others hold places, a caller's share is limited so that
their rounds stay short (Room), and it opens few outputs at a time: an output costs the most (its record, its session,
its prompt) before its first token.

A caller alone fills all places. When another one comes, the outputs beyond its share give their places back after their
next commit, the last started first, and wait in front of its other ones; they continue where they stopped. Otherwise
64 answers of 400 tokens would keep a short question waiting for half a minute.

What an output costs the others depends on the machine: on a GPU 64 sessions may take as long a round as one, on two CPU
cores 16 take twice as long as 8. So the verifiers say how long their rounds are (VerifierInfo.round_us), and one
caller's outputs may make those of all others take at most twice as long.

A caller is an API key's name, or without keys an address. An output that has begun elsewhere does not wait to start
here, nor does one that moves to another verifier. VTC ("Fairness in Serving Large Language Models", OSDI 2024) balances
tokens instead among callers who always wait; but it starts whatever fits, which slows down callers who do not wait. Not
here: how many requests may wait (quotas.py), and at which verifier an output runs (fleet/placement.py).

All of this runs on one event loop and needs no clock.
"""

from __future__ import annotations

import asyncio
import itertools
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.gateway.fleet.pool import Pool
from outrider.shared.messages import VerifierInfo

# outputs; that one caller opens at a time while others wait; one prompt is read while the next one is on its way
MAX_OPENING = 2
# outputs; of one request that run at a time; the rest of a large n waits its turn instead of filling the verifier
MAX_PARALLEL_CHOICES = 32
# ratio; how much longer one caller may make the rounds of the others; tests/attacks measures it
MAX_SLOWDOWN = 2.0
# share; of all places, for one caller while others hold some; leaves the others a free place for their next output
_MAX_SHARE_AMONG_OTHERS = 0.5


@dataclass(frozen=True)
class Room:
    """The capacity of the verifiers that serve now."""

    verifiers: Pool[VerifierInfo]

    def num_places(self) -> int:
        """Returns the number of sessions that the verifiers take in total; 0: unknown, as none serves."""
        return sum(info.max_sessions for info in self._infos())

    def max_per_caller(self, num_others: int) -> int:
        """Returns the number of outputs that one caller may run while others have num_others; at least 1."""
        infos = self._infos()
        places = max(1, int(_MAX_SHARE_AMONG_OTHERS * sum(info.max_sessions for info in infos)))
        own = [_max_per_caller(info.round_us, places, num_others / len(infos)) for info in infos]
        return max(1, min(places, sum(own)))

    def _infos(self) -> list[VerifierInfo]:
        return [member.info for member in self.verifiers.healthy() if member.info is not None]


@dataclass
class _Share:
    """One caller's outputs here. num_opening: of num_held, those without a token yet. waiting: in order. running:
    places by their start. gave_way: some were asked back, and it opens few outputs at a time since, even when alone.
    """

    num_held: int = 0
    num_opening: int = 0
    gave_way: bool = False
    running: dict[Place, None] = field(default_factory=dict)
    waiting: dict[asyncio.Future[None], None] = field(default_factory=dict)


class Place:
    """One output's. `opened`: its first tokens are in the log. `free`: it has ended. Both may be called again."""

    def __init__(self, starts: FairStarts, caller: str, share: _Share) -> None:
        self._starts = starts
        self._caller = caller
        self._share = share
        self._hold()

    def _hold(self) -> None:
        self._is_opening = self._is_held = True
        self.is_asked_back = False
        self._share.running[self] = None

    def gives_way(self) -> bool:
        """Returns whether the output is to stop after this commit and `take_again` later."""
        return self.is_asked_back

    async def take_again(self) -> None:
        """Gives the place to others and waits for another one, before all outputs of its caller that have not begun."""
        self.free()
        self._share = await self._starts.wait(self._caller, is_first=True)
        self._hold()

    def opened(self) -> None:
        if self._is_opening:
            self._is_opening = False
            self._starts.give_back(self._share, num_held=0, num_opening=1)

    def free(self) -> None:
        if self._is_held:
            num_opening, self._is_opening, self._is_held = int(self._is_opening), False, False
            del self._share.running[self]
            self._starts.give_back(self._share, num_held=1, num_opening=num_opening)


class FairStarts:
    """The queue of outputs that wait to start, one per gateway."""

    def __init__(self, room: Room) -> None:
        self._room = room
        # Those with outputs, the one that has started nothing for longest first.
        self._shares: OrderedDict[str, _Share] = OrderedDict()
        self._num_held = 0
        # outputs; that had to give way to other callers' since the start
        self.num_asked_back = 0

    @property
    def num_waiting(self) -> int:
        return sum(len(share.waiting) for share in self._shares.values())

    def take_now(self, caller: str) -> Place:
        """Takes a place at once, for an output that must not wait."""
        share = self._shares.setdefault(caller, _Share())
        self._count(caller, share)
        self._ask_back(caller)
        return Place(self, caller, share)

    async def take(self, caller: str) -> Place:
        """Waits for the caller's turn. Raises nothing; a cancelled wait leaves no trace."""
        share = await self.wait(caller)
        return Place(self, caller, share)

    async def wait(self, caller: str, *, is_first: bool = False) -> _Share:
        """Waits for the caller's turn, is_first: before its other outputs; returns its share, which counts one more."""
        share = self._shares.setdefault(caller, _Share())
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if is_first:
            share.waiting = {turn: None, **share.waiting}
        else:
            share.waiting[turn] = None
        self._start_next()
        self._ask_back(caller)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it came at the same moment
                Place(self, caller, share).free()
            else:
                share.waiting.pop(turn, None)
                self._start_next()
            raise
        return share

    def give_back(self, share: _Share, *, num_held: int, num_opening: int) -> None:
        """Lowers the counts by those given and starts waiting outputs. Called by Place."""
        share.num_held -= num_held
        share.num_opening -= num_opening
        self._num_held -= num_held
        self._start_next()

    def _count(self, caller: str, share: _Share) -> None:
        share.num_held += 1
        share.num_opening += 1
        self._num_held += 1
        self._shares.move_to_end(caller)

    def _start_next(self) -> None:
        """Starts all outputs that may start. To be called after every change to what may start."""
        for caller in [caller for caller, share in self._shares.items() if not (share.num_held or share.waiting)]:
            del self._shares[caller]
        num_places = self._room.num_places()
        while not num_places or self._num_held < num_places:
            able = [
                caller
                for caller, share in self._shares.items()
                if share.waiting and (not num_places or self._may_start(share))
            ]
            if not able:
                return
            caller = min(able, key=lambda caller: self._shares[caller].num_held)
            share = self._shares[caller]
            turn = next(iter(share.waiting))
            del share.waiting[turn]
            if not turn.done():  # else it was cancelled, which its task is about to see
                self._count(caller, share)
                turn.set_result(None)

    def _ask_back(self, comer: str) -> None:
        """Asks the others' outputs beyond their shares for their places, now that this caller has come."""
        for caller, share in self._shares.items():
            if caller == comer or not self._room.num_places():  # which it is while none serves
                continue
            num_others = self._num_held - share.num_held + len(self._shares[comer].waiting)
            surplus = len(share.running) - self._room.max_per_caller(num_others) - MAX_OPENING
            for place in list(reversed(share.running))[: max(0, surplus)]:
                self.num_asked_back += not place.is_asked_back
                place.is_asked_back = share.gave_way = True

    def _may_start(self, share: _Share) -> bool:
        """Returns whether a caller may start an output in a free place. A sole caller always may, unless it gave way.
        Another may while fewer than MAX_OPENING of its outputs are opening and it holds nothing or less than its share.
        """
        is_alone = len(self._shares) == 1
        if is_alone and not share.gave_way:
            return True
        if share.num_opening >= MAX_OPENING:
            return False
        num_others = self._num_held - share.num_held
        return is_alone or not share.num_held or share.num_held < self._room.max_per_caller(num_others)


def _max_per_caller(round_us: Sequence[int], most: int, num_others: float) -> int:
    """Returns how many outputs, up to `most`, one caller may run at a verifier with num_others sessions of others."""
    if not round_us:
        return most
    rising_us = list(itertools.accumulate(round_us, max))  # more sessions that measure less are noise
    limit_us = MAX_SLOWDOWN * _round_us(rising_us, max(1.0, num_others))
    return bisect_right(range(1, most + 1), limit_us, key=lambda own: _round_us(rising_us, num_others + own))


def _round_us(round_us: Sequence[int], num_sessions: float) -> float:
    """Interpolates between the known powers of two, linearly; extrapolates beyond them."""
    power = min(int(num_sessions).bit_length() - 1, len(round_us) - 2)
    if power < 0:
        return float(round_us[0])
    before, after = round_us[power], round_us[power + 1]
    return before + (after - before) * (num_sessions / (1 << power) - 1.0)
