"""Whatever the drafter does, the output is the target's, and a drafter's trouble costs what it is said to cost.

Real loop, drafting and commit sink; verifier and drafters are plain ones in this process (in_process.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from in_process import EAGLE, LENGTH, MEDUSA, NGRAM, TRUTH, Choice, PlainDrafter, maker, resumed

from outrider.gateway.proposals.ask import DraftPlan
from outrider.gateway.proposals.remote_source import ALONE_RUN
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import DrafterLost, InvalidRequest, Overloaded
from outrider.shared.messages import DraftMethodInfo, DraftStep, Proposal, ProposalReply

TIMEOUT_S = 0.05


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Choice]:
    return maker(tokenizer)


def check_closed(choice: Choice, num_opened: int | None = None) -> None:
    """Every place that was taken has been given back, once."""
    num_leases = sum(choice.offers[min(n, len(choice.offers) - 1)] is not None for n in range(choice.num_acquired))
    assert choice.num_released == num_leases == (num_leases if num_opened is None else num_opened)
    assert all(drafter.num_closed >= 1 for drafter in choice.drafters if drafter.session is not None)
    assert choice.verifier.num_closed == 1


@pytest.mark.parametrize("method", [NGRAM, MEDUSA, EAGLE], ids=lambda method: method.name)
@pytest.mark.parametrize("num_committed", [0, 1, 23])
async def test_a_good_drafter_is_asked_every_round(
    make: Callable[..., Choice], method: DraftMethodInfo, num_committed: int
) -> None:
    drafter = PlainDrafter()
    choice = resumed(make(drafter, method=method), num_committed)
    assert await choice.run() == TRUTH[num_committed:]
    check_closed(choice, num_opened=1)
    # Its first round, or the one that brings the first hidden states, goes without; every other brings five tokens.
    num_plain = sum(step.proposal is None for step in choice.verifier.steps)
    assert num_plain == (1 if num_committed == 0 or method is not NGRAM else 0)
    assert all(step.max_new_tokens == (1 if step.proposal is None else 0) for step in choice.verifier.steps)
    assert len(choice.verifier.steps) == num_plain + -(-(LENGTH - num_committed - num_plain) // 5)


async def test_without_a_plan_nobody_is_asked_and_one_free_run_does_it_all(make: Callable[..., Choice]) -> None:
    choice = make(PlainDrafter(), plan=None)
    assert await choice.run() == TRUTH
    assert choice.num_acquired == 0
    assert [step.max_new_tokens for step in choice.verifier.steps] == [LENGTH]


async def test_where_no_drafter_is_to_be_had_it_asks_again_after_each_run(make: Callable[..., Choice]) -> None:
    choice = make(None)
    assert await choice.run() == TRUTH
    assert [step.max_new_tokens for step in choice.verifier.steps] == [ALONE_RUN] * -(-LENGTH // ALONE_RUN)
    assert choice.num_acquired == -(-LENGTH // ALONE_RUN)


async def test_a_drafter_that_hangs_costs_one_timeout(make: Callable[..., Choice]) -> None:
    async def hang(_drafter: PlainDrafter, _step: DraftStep) -> None:
        await asyncio.Event().wait()

    drafter = PlainDrafter(hang)
    choice = make(drafter, timeout_s=TIMEOUT_S)
    assert await choice.run() == TRUTH
    assert choice.count("draft_timeouts") == len(drafter.steps) == 1
    assert TIMEOUT_S <= choice.seconds < 30.0
    check_closed(choice, num_opened=1)


async def test_a_late_answer_is_dropped_and_the_drafter_asked_again(make: Callable[..., Choice]) -> None:
    release = asyncio.Event()

    async def late_once(drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == 2:
            await release.wait()

    drafter = PlainDrafter(late_once)
    # Longer than a round may take on a busy machine: what took so long was the answer.
    timeout_s = 3.0
    choice = make(drafter, timeout_s=timeout_s)
    choice.verifier.forward_s = 0.001
    running = asyncio.create_task(choice.run())
    await choice.until_late()
    release.set()
    assert await running == TRUTH
    assert choice.count("draft_timeouts") == 1
    # Steps: prefill, a proposal, the run alone while it is late, proposals again.
    budgets = [step.max_new_tokens for step in choice.verifier.steps]
    assert budgets == [1, 0, ALONE_RUN, *[0] * (len(budgets) - 3)]
    bases = {step.proposal.base_len == step.base_len for step in choice.verifier.steps if step.proposal}
    assert bases == {True}
    overhead_s = float(choice.metrics._overhead._sum.get())
    assert overhead_s < timeout_s, "the timeout is no cost of the round that follows it"


@pytest.mark.parametrize("shift", [-30, -3, -1, 1, 3])
async def test_a_proposal_that_stands_elsewhere_changes_nothing(make: Callable[..., Choice], shift: int) -> None:
    async def lie(_drafter: PlainDrafter, step: DraftStep) -> ProposalReply:
        return _drafter.reply(replace(step, base_len=step.base_len + shift), (1, 2, 3))

    drafter = PlainDrafter(lie)
    choice = make(drafter)
    assert await choice.run() == TRUTH
    assert len(drafter.steps) == LENGTH - 1
    check_closed(choice, num_opened=1)


@pytest.mark.parametrize("guess", [(), (1,), TRUTH[:4], tuple(range(400))], ids=["none", "one", "constant", "many"])
async def test_wrong_guesses_cost_rounds_only(make: Callable[..., Choice], guess: tuple[int, ...]) -> None:
    async def answer(drafter: PlainDrafter, step: DraftStep) -> ProposalReply:
        return drafter.reply(step, guess)

    choice = make(PlainDrafter(answer))
    assert await choice.run() == TRUTH
    assert len(choice.verifier.steps) <= LENGTH
    assert all((step.proposal is None) == (not guess) for step in choice.verifier.steps[1:])


@pytest.mark.parametrize("error", [DrafterLost("gone"), InvalidRequest("what?"), Overloaded("full")], ids=repr)
async def test_a_dying_drafter_is_replaced_after_a_run_alone(make: Callable[..., Choice], error: Exception) -> None:
    async def die_at_third(drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == 3:
            raise error

    first, second = PlainDrafter(die_at_third), PlainDrafter()
    choice = make(first, second)
    assert await choice.run() == TRUTH
    assert choice.count("drafters_lost") == 1
    check_closed(choice, num_opened=2)
    assert first.num_closed == second.num_closed == 1
    assert second.session is not None
    # Prefill and two good rounds: 11 tokens; then alone; the new one is told all that there is.
    assert second.session.spec.committed_token_ids == TRUTH[: 11 + ALONE_RUN]
    assert second.session.spec.method == "ngram"


async def test_drafters_that_cannot_be_opened_are_given_back(make: Callable[..., Choice]) -> None:
    dead = [PlainDrafter(open_error=DrafterLost("gone")) for _ in range(2)]
    good = PlainDrafter()
    choice = make(*dead, good)
    assert await choice.run() == TRUTH
    assert [drafter.num_closed for drafter in (*dead, good)] == [1, 1, 1]
    check_closed(choice, num_opened=3)
    assert good.session is not None
    assert len(good.session.spec.committed_token_ids) == 2 * ALONE_RUN


async def test_a_drafter_that_dies_on_being_told_hidden_states_is_replaced(make: Callable[..., Choice]) -> None:
    choice = make(PlainDrafter(advance_error=DrafterLost("gone")), PlainDrafter(), method=EAGLE)
    choice.verifier.max_hidden_rows = 5
    assert await choice.run() == TRUTH
    assert choice.count("drafters_lost") == 1
    check_closed(choice, num_opened=2)


async def test_a_drafter_that_dies_while_it_is_late_is_replaced(make: Callable[..., Choice]) -> None:
    async def die_late(_drafter: PlainDrafter, _step: DraftStep) -> None:
        await asyncio.sleep(3 * TIMEOUT_S)
        raise DrafterLost("gone")

    first, second = PlainDrafter(die_late), PlainDrafter()
    choice = make(first, second, timeout_s=TIMEOUT_S)
    choice.verifier.forward_s = TIMEOUT_S / 5
    assert await choice.run() == TRUTH
    assert (choice.count("draft_timeouts"), choice.count("drafters_lost")) == (1, 1)
    check_closed(choice, num_opened=2)
    assert len(second.steps) > 1


@pytest.mark.parametrize("where", ["drafter", "verifier", "late"])
async def test_a_cancelled_choice_closes_everything(make: Callable[..., Choice], where: str) -> None:
    async def hang(_drafter: PlainDrafter, _step: DraftStep) -> None:
        if where != "verifier":
            await asyncio.Event().wait()

    drafter = PlainDrafter(hang)
    choice = make(drafter, timeout_s=TIMEOUT_S if where == "late" else 60.0)
    choice.verifier.forward_s = 60.0 if where == "verifier" else 0.01
    before = asyncio.all_tasks()
    running = asyncio.create_task(choice.run())
    reached: dict[str, Callable[[], object]] = {
        "drafter": lambda: drafter.steps,
        "verifier": lambda: choice.verifier.steps,
        "late": lambda: choice.count("draft_timeouts"),
    }
    while not reached[where]():  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    others = asyncio.all_tasks() - before - {running}
    assert len(others) >= 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert running.cancelled()
    check_closed(choice, num_opened=1)
    assert drafter.num_closed == 1
    _, left_over = await asyncio.wait(others, timeout=30)
    assert not left_over


async def test_a_fixed_length_is_asked_for_as_it_is(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter, plan=DraftPlan("ngram", 3))
    assert await choice.run() == TRUTH
    assert {step.num_draft_tokens for step in drafter.steps} == {3}
    assert {step.max_tree_nodes for step in drafter.steps} == {0}
    proposal = choice.verifier.steps[1].proposal
    assert proposal == Proposal(1, TRUTH[1:4], "ngram")
