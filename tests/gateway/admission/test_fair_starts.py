"""Whose output starts next, by simulation: nothing here waits for time."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

import pytest

from outrider.gateway.admission.fair_starts import MAX_OPENING, FairStarts, Place


@dataclass
class Room:
    """beside: most of one caller; None: no bound."""

    places: int = 64
    beside: int | None = None

    def num_places(self) -> int:
        return self.places

    def max_per_caller(self, num_others: int) -> int:
        return max(1, self.places if self.beside is None else self.beside)


class Caller:
    """Its outputs in the order of their starts."""

    def __init__(self, starts: FairStarts, name: str) -> None:
        self._starts = starts
        self.name = name
        self.waits: list[asyncio.Task[None]] = []
        self.opening: list[Place] = []
        self.running: list[Place] = []
        self.again: list[asyncio.Task[None]] = []

    @property
    def num_held(self) -> int:
        return len(self.opening) + len(self.running)

    async def ask(self, count: int) -> None:
        self.waits += [asyncio.create_task(self._start()) for _ in range(count)]
        await settled()

    async def _start(self) -> None:
        self.opening.append(await self._starts.take(self.name))

    async def open(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.opening))):
            self.running.append(self.opening.pop(0))
            self.running[-1].opened()
        await settled()

    async def give_way(self) -> list[Place]:
        """Outputs that were asked back stop, and wait again."""
        left = [place for place in self.running if place.gives_way()]
        self.running = [place for place in self.running if not place.gives_way()]
        self.again += [asyncio.create_task(self._take_again(place)) for place in left]
        await settled()
        return left

    async def _take_again(self, place: Place) -> None:
        await place.take_again()
        self.opening.append(place)

    async def end(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.running))):
            self.running.pop(0).free()
        await settled()


async def settled() -> None:
    """Until every task that could go on has."""
    for _ in range(4):
        await asyncio.sleep(0)


async def test_a_caller_alone_takes_all_places_at_once() -> None:
    starts = FairStarts(Room(places=64, beside=1))
    alone = Caller(starts, "alone")
    await alone.ask(100)
    assert (len(alone.opening), starts.num_waiting) == (64, 36)
    await alone.open(1)
    assert alone.num_held == 64
    await alone.end(1)
    assert alone.num_held == 64
    assert starts.num_waiting == 35


async def test_five_hundred_outputs_of_one_caller_do_not_keep_eight_of_another_waiting() -> None:
    starts = FairStarts(Room(places=64, beside=8))
    greedy, other = Caller(starts, "greedy"), Caller(starts, "other")
    await greedy.ask(510)
    await greedy.open(64)
    begun = list(greedy.running)
    await other.ask(8)
    assert other.num_held == 0  # until the next commits
    left = await greedy.give_way()
    assert left == begun[8 + MAX_OPENING :]  # the last started first
    assert (greedy.num_held, starts.num_asked_back) == (8 + MAX_OPENING, 64 - 8 - MAX_OPENING)
    for _ in range(8):
        await other.open(1)
    assert other.num_held == 8
    await greedy.end(MAX_OPENING)
    assert (other.num_held, greedy.num_held) == (8, 8)
    for _ in range(100):
        assert len(greedy.opening) <= MAX_OPENING
        assert greedy.num_held <= 8
        await greedy.open(1)
        await greedy.end(1)
    await other.end(8)
    for _ in range(40):  # alone again: all places, but few prompts at a time, as others may come back
        assert len(greedy.opening) <= MAX_OPENING
        await greedy.open(MAX_OPENING)
    assert greedy.num_held == 64


async def test_an_output_that_gave_way_goes_on_before_those_that_have_not_begun() -> None:
    starts = FairStarts(Room(places=4, beside=1))
    many, other = Caller(starts, "many"), Caller(starts, "other")
    await many.ask(6)
    await many.open(4)
    await other.ask(1)
    [left] = await many.give_way()
    assert (other.num_held, many.num_held) == (1, 3)
    await other.open(1)
    await other.end(1)
    assert many.opening == [left]


async def test_one_that_waits_again_and_is_cancelled_leaves_no_trace() -> None:
    starts = FairStarts(Room(places=4, beside=1))
    many, other = Caller(starts, "many"), Caller(starts, "other")
    await many.ask(4)
    await many.open(4)
    await other.ask(2)
    [left] = await many.give_way()
    many.again[0].cancel()
    await settled()
    left.free()
    await many.end(3)
    await other.open(2)
    await other.end(2)
    assert (starts.num_waiting, starts._num_held, starts._shares) == (0, 0, {})


async def test_beside_others_a_caller_opens_few_outputs_at_a_time() -> None:
    starts = FairStarts(Room())
    first, second = Caller(starts, "first"), Caller(starts, "second")
    await first.ask(1)
    await second.ask(20)
    assert len(second.opening) == MAX_OPENING
    await second.open(1)
    assert (len(second.opening), len(second.running)) == (MAX_OPENING, 1)
    await first.open(1)
    await first.end(1)
    assert second.num_held == 20


async def test_a_free_place_is_the_callers_who_holds_fewest_in_turn_among_equals() -> None:
    starts = FairStarts(Room(places=6))
    many = Caller(starts, "many")
    await many.ask(20)
    await many.open(6)
    others = [Caller(starts, name) for name in "abc"]
    for other in others:
        await other.ask(3)
    got = []
    for _ in range(4):
        before = [other.num_held for other in others]
        await many.end(1)
        for other in others:
            await other.open(1)
        got.append([other.num_held - count for other, count in zip(others, before, strict=True)].index(1))
    assert got == [0, 1, 2, 0]
    await many.end(1)  # which holds one now, as the last two of the others do, and has started nothing for longest
    assert [caller.num_held for caller in (many, *others)] == [2, 2, 1, 1]


async def test_what_has_begun_elsewhere_never_waits() -> None:
    starts = FairStarts(Room(places=2))
    caller = Caller(starts, "caller")
    await caller.ask(3)
    resumed = starts.take_now("caller")
    await caller.open(2)
    await caller.end(1)
    assert starts.num_waiting == 1  # the resumed one has the place
    resumed.free()
    resumed.free()  # gives back one place, not two
    await settled()
    assert (caller.num_held, starts.num_waiting) == (2, 0)


async def test_without_a_verifier_every_output_waits_for_one_by_itself() -> None:
    """Beside others they would else time out two by two."""
    room = Room(places=0)
    starts = FairStarts(room)
    callers = [Caller(starts, name) for name in "ab"]
    for caller in callers:
        await caller.ask(50)
    assert [caller.num_held for caller in callers] == [50, 50]


async def test_a_verifier_that_is_lost_leaves_its_outputs_their_places() -> None:
    room = Room(places=8)
    starts = FairStarts(room)
    caller = Caller(starts, "caller")
    await caller.ask(12)
    await caller.open(8)
    room.places = 4
    await caller.end(4)
    assert caller.num_held == 4
    await caller.end(1)
    assert caller.num_held == 4


@pytest.mark.parametrize("is_granted", [False, True])
async def test_a_caller_that_gives_up_leaves_no_trace(is_granted: bool) -> None:
    starts = FairStarts(Room(places=1))
    caller = Caller(starts, "caller")
    await caller.ask(3)
    await caller.open(1)
    if is_granted:  # the place comes in the moment of giving up
        caller.running.pop().free()
    caller.waits[1].cancel()
    await settled()
    assert starts.num_waiting == (0 if is_granted else 1)
    if not is_granted:
        await caller.end(1)
    assert len(caller.opening) == 1
    await caller.open(1)
    await caller.end(1)
    assert (caller.num_held, starts.num_waiting) == (0, 0)
    assert (await asyncio.wait_for(starts.take("another"), timeout=60)) is not None


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_comes_and_goes_nobody_waits_for_nothing(seed: int) -> None:
    """The oracle: at rest somebody waits only if all places are taken, or each who waits is held back by the rules."""
    rng = random.Random(seed)
    room = Room(places=rng.choice([1, 3, 16]), beside=rng.choice([1, 2, 5, None]))
    starts = FairStarts(room)
    callers = [Caller(starts, f"caller {number}") for number in range(4)]
    asked = 0
    for _ in range(400):
        caller = rng.choice(callers)
        match rng.randrange(5):
            case 0:
                count = rng.randrange(6)
                asked += count
                await caller.ask(count)
            case 1:
                await caller.open(rng.randrange(4))
            case 2 if caller.opening:  # ends before its first token
                caller.opening.pop(rng.randrange(len(caller.opening))).free()
                await settled()
            case 3 if caller.waits:
                wait = rng.choice(caller.waits)
                asked -= wait.cancel()
                await settled()
            case _:
                await caller.end(rng.randrange(4))
        _check(room, callers)
    for _ in range(10_000):
        for caller in callers:
            await caller.open(100)
            await caller.end(100)
        if not any(caller.num_held for caller in callers):
            break
    assert starts.num_waiting == 0
    assert sum(wait.done() and not wait.cancelled() for caller in callers for wait in caller.waits) == asked


def _check(room: Room, callers: list[Caller]) -> None:
    held = sum(caller.num_held for caller in callers)
    waiting = [caller for caller in callers if any(not wait.done() for wait in caller.waits)]
    active = [caller for caller in callers if caller.num_held or caller in waiting]
    assert held <= room.places
    if held == room.places:
        return
    for caller in waiting:
        assert len(active) > 1
        assert len(caller.opening) >= MAX_OPENING or caller.num_held >= room.max_per_caller(held - caller.num_held)
