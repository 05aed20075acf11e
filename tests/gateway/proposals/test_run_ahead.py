"""Asking for the next proposal before this one is verified: what is asked, when it is used, and when it pays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from in_process import EAGLE, PROMPT, TRUTH, Choice, PlainDrafter, make_spec, maker

from outrider.gateway.proposals.ask import DraftPlan
from outrider.gateway.proposals.run_ahead import AheadTrials
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import DrafterLost
from outrider.shared.messages import DraftMethodInfo, DraftStep, NextDraft, ProposalReply
from outrider.shared.sampling_params import SpeculationMode

NUM = 4  # draft tokens of a Choice's plan


class Always(AheadTrials):
    def allows(self, method: str, open_sessions: int) -> bool:
        return True


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Choice]:
    return maker(tokenizer, trials=Always())


def asked_ahead(choice: Choice) -> tuple[float, float]:
    """How many were used and how many were not, as a scrape reads them."""
    families = choice.metrics.registry.collect()
    samples = {
        sample.labels["used"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "outrider:drafts_asked_ahead_total"
    }
    return samples["yes"], samples["no"]


async def test_a_drafter_that_is_always_right_is_always_asked_ahead(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter)
    assert await choice.run() == TRUTH
    first, *rest = drafter.steps
    assert first == DraftStep(1, 0, TRUTH[:1], NUM + 1)
    assert [(step.base_len, step.committed_token_ids) for step in rest[:3]] == [
        (base_len, TRUTH[base_len : base_len + NUM + 1]) for base_len in (1, 6, 11)
    ]
    used, unused = asked_ahead(choice)
    assert used == len(choice.verifier.steps) - 2  # neither the prefill's round nor the first draft
    assert unused == 0
    assert all(len(step.proposal.token_ids) <= NUM for step in choice.verifier.steps if step.proposal)


@pytest.mark.parametrize("wrong_every", [1, 2, 3, 5, 7])
async def test_guesses_that_do_not_hold_change_nothing(make: Callable[..., Choice], wrong_every: int) -> None:
    """The drafter's own session refuses gaps; what it knows after each real question is what was committed."""

    async def sometimes_wrong(drafter: PlainDrafter, step: DraftStep) -> ProposalReply:
        right = list(TRUTH[step.committed_len :][: step.num_draft_tokens])
        for place, token in enumerate(right):
            if (step.committed_len + place) % wrong_every == 0:
                right[place] = token + 1
        return drafter.reply(step, right)

    drafter = PlainDrafter(sometimes_wrong, guesses=True)
    choice = make(drafter)
    assert await choice.run() == TRUTH
    _used, unused = asked_ahead(choice)
    assert unused > 0
    assert choice.count("drafters_lost") == 0
    drafted = [step for step in choice.verifier.steps if step.proposal is not None]
    assert len(drafted) > 5
    assert all(step.proposal.base_len == step.base_len for step in drafted if step.proposal)


async def test_an_answer_that_is_still_on_its_way_is_waited_for(make: Callable[..., Choice]) -> None:
    """A slow drafter works while the verifier does: a round takes the longer of the two, not both."""
    running: list[int] = []  # forwards that had begun and not ended at each question

    async def slow(_drafter: PlainDrafter, _step: DraftStep) -> None:
        running.append(len(choice.verifier.steps) - choice.verifier.num_ended)
        await asyncio.sleep(0.01)

    for trials in (Always(), None):
        choice = make(PlainDrafter(slow))
        choice.trials = trials
        running.clear()
        choice.verifier.forward_s = 0.01
        assert await choice.run() == TRUTH
        used, unused = asked_ahead(choice)
        assert unused == 0
        assert used == (0 if trials is None else len(running) - 1)
        assert running == ([0] * len(running) if trials is None else [0] + [1] * (len(running) - 1))
        assert len(running) > 5


async def test_nothing_is_asked_ahead_where_a_proposal_could_change_the_output(make: Callable[..., Choice]) -> None:
    for options in (
        {"spec": replace(make_spec(), mode=SpeculationMode.REJECTION)},
        {"method": EAGLE},
        {"method": DraftMethodInfo("ngram", max_num_draft_tokens=NUM)},
        {"method": DraftMethodInfo("ngram", max_model_len=len(PROMPT) + 8)},
    ):
        drafter = PlainDrafter()
        choice = make(drafter, **options)
        assert await choice.run() == TRUTH
        assert {step.num_draft_tokens for step in drafter.steps} <= {NUM}
        assert asked_ahead(choice) == (0, 0)


async def test_a_tree_is_not_asked_for_ahead(make: Callable[..., Choice]) -> None:
    choice = make(drafter := PlainDrafter())
    choice.plan = DraftPlan("ngram", NUM, token_tree=True)
    drafting = choice.drafting(list(TRUTH[:2]))
    await drafting.propose(2)
    assert [step.num_draft_tokens for step in drafter.steps] == [NUM]
    await drafting.close()


async def test_a_drafter_that_dies_over_a_guess_is_replaced(tokenizer: Tokenizer) -> None:
    async def die_ahead(drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == 2:
            raise DrafterLost("gone")

    first, second = PlainDrafter(die_ahead), PlainDrafter()
    choice = Choice(tokenizer, [first, second], trials=Always())
    assert await choice.run() == TRUTH
    assert choice.count("drafters_lost") == 1
    assert (first.num_closed, second.num_closed, choice.num_released) == (1, 1, 2)


async def test_closing_ends_what_was_asked_ahead(make: Callable[..., Choice]) -> None:
    cancelled = asyncio.Event()

    async def hang_ahead(drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == 2:
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    drafter = PlainDrafter(hang_ahead)
    choice = make(drafter)
    drafting = choice.drafting(list(TRUTH[:3]))
    assert (await drafting.propose(3)).proposal is not None
    await asyncio.sleep(0)
    await drafting.close()
    assert cancelled.is_set()
    assert (drafter.num_closed, choice.num_released) == (1, 1)


# ---- answers that nobody waits for ----


async def test_without_a_proof_that_it_changes_nothing_the_whole_timeout_is_waited_for(
    make: Callable[..., Choice],
) -> None:
    async def slow(_drafter: PlainDrafter, _step: DraftStep) -> None:
        await asyncio.sleep(0.03)

    plan, spec = DraftPlan("auto", NUM), replace(make_spec(), mode=SpeculationMode.REJECTION)
    choice = make(PlainDrafter(slow), plan=plan, spec=spec)
    choice.verifier.wants = (NextDraft("ngram", NUM, 0),)
    assert await choice.run() == TRUTH
    assert choice.verifier.steps[1].proposal is not None


# ---- whether it pays ----


def settle(trials: AheadTrials, plain_s: float, ahead_s: float, num_rounds: int = 400) -> bool:
    for _ in range(num_rounds):
        ahead = trials.allows("ngram", 1)
        trials.observe("ngram", 1, ahead_s if ahead else plain_s, ahead=ahead)
    return trials.allows("ngram", 1)


def test_both_ways_are_measured_and_the_shorter_rounds_win() -> None:
    assert not AheadTrials().allows("ngram", 1)
    assert settle(AheadTrials(), 0.030, 0.025)
    assert not settle(AheadTrials(), 0.030, 0.032)
    assert not settle(AheadTrials(), 0.030, 0.0298), "within the noise"


def test_what_changes_is_noticed_and_loads_and_methods_are_apart() -> None:
    trials = AheadTrials()
    assert settle(trials, 0.030, 0.025)
    assert not settle(trials, 0.030, 0.040, 5000)
    assert settle(trials, 0.030, 0.020, 9000)
    assert not trials.allows("ngram", 16)
    assert not trials.allows("suffix", 1)


def test_another_way_to_the_drafter_is_measured_at_once() -> None:
    trials = AheadTrials()
    assert not settle(trials, 0.020, 0.021)
    assert settle(trials, 0.040, 0.030, 300), "not after the thousand rounds that the last comparison was good for"


def test_measuring_the_worse_way_costs_little() -> None:
    trials, seconds = AheadTrials(), 0.0
    for _ in range(4000):
        ahead = trials.allows("ngram", 1)
        seconds += (took := 0.06 if ahead else 0.03)
        trials.observe("ngram", 1, took, ahead=ahead)
    assert seconds < 1.07 * 4000 * 0.03
