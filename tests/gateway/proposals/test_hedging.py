"""Two drafters for one session: which is asked when, what each is told, and that both places are given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc.aio
import pytest
from in_process import NGRAM, TRUTH, Choice, PlainDrafter, maker
from prometheus_client import CollectorRegistry
from verifier_fleet import Fleet

from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Member, Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.proposals.drafter_connection import Lease
from outrider.gateway.proposals.hedging import AnswerTimes, HedgedDrafter
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ValidRequest
from outrider.shared.errors import DrafterLost
from outrider.shared.messages import DrafterInfo, DraftMethodInfo, DraftStep
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import SamplingParams
from outrider.shared.speculative_config import SpeculativeConfig

# Answers of the drafters below come at once, or when a gate opens.
USUAL_S = 0.01


def known_times() -> AnswerTimes:
    times = AnswerTimes()
    for _ in range(200):
        times.add(USUAL_S)
    return times


@dataclass
class HedgedChoice(Choice):
    """The first offer leads; the others are what is there when another one is looked for, one after the other."""

    times: AnswerTimes = field(default_factory=known_times)

    def acquire(self, wanted: str) -> Lease | None:
        first = super().acquire(wanted)
        return HedgedDrafter(first, self._acquire_other, self.times, self.metrics).lease if first is not None else None

    def _acquire_other(self, _excluding: str) -> Lease | None:
        return super().acquire(self.method.name) if self.num_acquired < len(self.offers) else None


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., HedgedChoice]:
    return maker(tokenizer, HedgedChoice)


class Gate:
    """Behaviour of a drafter that stops at its n-th question until it is opened."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.opened = asyncio.Event()

    async def __call__(self, drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == self.at:
            await self.opened.wait()


def all_given_back(choice: Choice) -> bool:
    asked = choice.drafters[: choice.num_acquired]
    return choice.num_released == choice.num_acquired and all(drafter.num_closed == 1 for drafter in asked)


async def test_nobody_else_is_asked_while_answers_come_as_usual(make: Callable[..., HedgedChoice]) -> None:
    choice = make(PlainDrafter(), PlainDrafter(), times=AnswerTimes())
    assert await choice.run() == TRUTH
    assert (choice.num_acquired, choice.count("draft_hedges")) == (1, 0)
    assert all_given_back(choice)


async def test_one_that_hangs_is_left_alone_and_the_rounds_go_on_with_drafts(
    make: Callable[..., HedgedChoice],
) -> None:
    first, second = PlainDrafter(Gate(3)), PlainDrafter()
    choice = make(first, second)
    assert await choice.run() == TRUTH
    assert len(first.steps) == 3, "it still owes its answer"
    assert (choice.count("draft_hedges"), choice.count("draft_hedges_won"), choice.count("draft_timeouts")) == (1, 1, 0)
    hung_at = first.steps[-1].committed_len
    assert second.session is not None
    assert second.session.spec.committed_token_ids == TRUTH[:hung_at]
    assert second.session.spec.method == "ngram"
    assert [step.committed_len for step in second.steps] == list(range(hung_at, len(TRUTH), 5))
    assert [len(step.proposal.token_ids) if step.proposal else 0 for step in choice.verifier.steps[1:-1]] == [4] * 11
    assert all_given_back(choice)


async def test_one_that_has_answered_late_is_told_what_it_missed_when_its_turn_comes(
    make: Callable[..., HedgedChoice],
) -> None:
    """The two take turns at hanging; DraftSession refuses a gap and PlainDrafter compares what it was told."""
    gates = Gate(2), Gate(4)

    async def open_the_other(drafter: PlainDrafter, step: DraftStep) -> None:
        if len(drafter.steps) == 2:
            gates[0].opened.set()
        await gates[1](drafter, step)

    first, second = PlainDrafter(gates[0]), PlainDrafter(open_the_other)
    choice = make(first, second)
    assert await choice.run() == TRUTH
    assert len(first.steps) > 2
    assert first.steps[2].committed_token_ids == TRUTH[first.steps[1].committed_len : first.steps[2].committed_len]
    assert len(first.steps[2].committed_token_ids) > 5
    assert (choice.count("draft_hedges"), choice.count("draft_hedges_won")) == (2, 2)
    assert all_given_back(choice)


async def test_a_second_one_that_dies_is_not_noticed_and_replaced(make: Callable[..., HedgedChoice]) -> None:
    async def slow_twice(drafter: PlainDrafter, _step: DraftStep) -> None:
        while len(drafter.steps) == 2 and choice.num_acquired < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        while len(drafter.steps) == 4 and len(third.steps) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.001)

    third = PlainDrafter()
    choice = make(PlainDrafter(slow_twice), PlainDrafter(open_error=DrafterLost("gone")), third)
    assert await choice.run() == TRUTH
    assert (choice.count("draft_hedges"), choice.count("draft_hedges_won")) == (2, 1)
    assert choice.count("drafters_lost") == 0
    assert all_given_back(choice)


async def test_without_another_one_it_waits_as_before(make: Callable[..., HedgedChoice]) -> None:
    choice = make(PlainDrafter(Gate(3)), timeout_s=0.05)
    choice.offers.append(None)
    assert await choice.run() == TRUTH
    assert (choice.count("draft_hedges"), choice.count("draft_timeouts")) == (0, 1)
    assert choice.num_released == 1


async def test_when_the_first_is_lost_both_are_given_up(make: Callable[..., HedgedChoice]) -> None:
    async def die(drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == 3:
            raise DrafterLost("gone")

    choice = make(PlainDrafter(Gate(2)), PlainDrafter(die), PlainDrafter())
    assert await choice.run() == TRUTH
    assert choice.count("drafters_lost") == 1
    assert choice.num_acquired == 3
    assert all_given_back(choice)


@pytest.mark.parametrize("num_asked", [1, 2])
async def test_a_cancelled_session_gives_both_places_back(make: Callable[..., HedgedChoice], num_asked: int) -> None:
    """While one is asked, and while both are."""
    first, second = PlainDrafter(Gate(2)), PlainDrafter(Gate(1))
    choice = make(first, second)
    running = asyncio.create_task(choice.run())
    while not (second.steps if num_asked == 2 else len(first.steps) == 2):  # noqa: ASYNC110
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert choice.num_acquired == num_asked
    assert all_given_back(choice)


def test_the_usual_time_is_that_of_nineteen_in_twenty() -> None:
    times = AnswerTimes()
    for number in range(1, 101):
        assert (times.usual_s() is None) == (number <= 16)
        times.add(number)
    assert times.usual_s() == 95
    for _ in range(200):
        times.add(1.0)
    assert times.usual_s() == 1.0, "what is long ago is forgotten"


async def test_answers_that_lose_count_as_long_as_they_took(make: Callable[..., HedgedChoice]) -> None:
    """Or what is usual would shrink with each hedge, and everything be asked twice in the end."""
    times = AnswerTimes()
    for _ in range(16):
        times.add(USUAL_S)

    async def slow_once(drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == 2:
            while not second.steps:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.sleep(5 * USUAL_S)

    second = PlainDrafter()
    choice = make(PlainDrafter(slow_once), second, times=times)
    choice.verifier.forward_s = USUAL_S  # ten rounds more: longer than the slow answer takes
    assert await choice.run() == TRUTH
    assert choice.count("draft_hedges_won") == 1
    assert max(times._seconds) >= 5 * USUAL_S


# ---- which sessions are hedged ----------------------------------------------------------------------------------


@pytest.fixture
async def drafters() -> AsyncIterator[Pool[DrafterInfo]]:
    methods = (NGRAM, DraftMethodInfo("medusa", hidden_layers=(3,)))
    fleet: Pool[DrafterInfo] = Pool("drafter", (), _no_info)
    for place in range(2):
        address = f"10.0.0.{place}:7002"
        info = DrafterInfo("1", methods, 1, 0, 9)
        fleet._members[address] = Member(address, grpc.aio.insecure_channel(address), info, healthy=True)
    yield fleet
    await fleet.close()


async def _no_info(channel: grpc.aio.Channel, timeout_s: float) -> DrafterInfo:
    raise NotImplementedError


@pytest.mark.parametrize(
    ("method", "hedge", "expected"), [("ngram", True, True), ("ngram", False, False), ("medusa", True, False)]
)
async def test_only_exact_sessions_and_methods_that_need_no_hidden_states(
    tokenizer: Tokenizer, drafters: Pool[DrafterInfo], method: str, hedge: bool, expected: bool
) -> None:
    generation = Generation(
        GatewayConfig(),
        SpeculativeConfig(),
        tokenizer,
        Fleet([]),
        drafters,
        GatewayMetrics(CollectorRegistry()),
    )
    request = ValidRequest("r", (1,), SamplingParams(), speculation=Speculation(method=method))
    lease = generation._lease_drafter(request, method, hedge=hedge)
    assert lease is not None
    assert isinstance(lease.drafter, HedgedDrafter) == expected
    if isinstance(lease.drafter, HedgedDrafter):
        other = lease.drafter._acquire_other(lease.address)
        assert other is not None
        assert {lease.address, other.address} == {member.address for member in drafters.members}
        other.release()
    lease.release()
    assert [member.num_sessions for member in drafters.members] == [0, 0]
