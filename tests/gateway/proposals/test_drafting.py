"""A session's side towards its drafter, step by step: what is told, what is asked for, and what waiting costs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from in_process import (
    EAGLE,
    LENGTH,
    MEDUSA,
    NGRAM,
    PROMPT,
    TRUTH,
    Choice,
    PlainDrafter,
    hidden_rows,
    make_spec,
    maker,
)

from outrider.gateway.proposals.ask import Answer, DraftHint, DraftPlan
from outrider.gateway.proposals.drafting import Drafting
from outrider.gateway.proposals.remote_source import ALONE_RUN
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import DrafterLost
from outrider.shared.messages import (
    AutoDrafts,
    Commit,
    DrafterOffer,
    DraftMethodInfo,
    DraftStep,
    HiddenStatesRequest,
    NextDraft,
    ProposalReply,
)


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Choice]:
    return maker(tokenizer)


def told_rows(drafter: PlainDrafter) -> list[int]:
    """Output indices of all rows that it was given, in order."""
    steps = sorted([*drafter.steps, *drafter.advances], key=lambda step: step.committed_len)
    return [index for step in steps for piece in step.hidden_states for index in range(piece.first_index, piece.end)]


def has_all(drafter: PlainDrafter, asked: DraftStep) -> bool:
    """Whether all rows that existed at a question had been given with it, or before."""
    steps = [step for step in (*drafter.steps, *drafter.advances) if step.committed_len <= asked.committed_len]
    return max(piece.end for step in steps for piece in step.hidden_states) == asked.committed_len - 1


@pytest.mark.parametrize("max_hidden_rows", [3, 7, 1000])
@pytest.mark.parametrize("num_committed", [0, 9])
async def test_a_history_of_hidden_states_is_handed_over_once(
    make: Callable[..., Choice], num_committed: int, max_hidden_rows: int
) -> None:
    """From the prompt's first row on, in as many commits as it takes, before the first question."""
    drafter = PlainDrafter()
    choice = make(drafter, method=EAGLE, spec=make_spec(TRUTH[:num_committed]))
    choice.verifier.max_hidden_rows = max_hidden_rows
    assert await choice.run() == TRUTH[num_committed:]
    last = max(step.committed_len for step in (*drafter.steps, *drafter.advances))
    told = told_rows(drafter)
    assert told == list(range(-len(PROMPT), told[-1] + 1))
    assert last - 1 - max_hidden_rows <= told[-1] + 1 <= last - 1
    assert all(has_all(drafter, step) for step in drafter.steps)
    assert len(drafter.steps) > 1
    assert bool(drafter.advances) == (max_hidden_rows < 1000 or num_committed > 0)
    assert drafter.session is not None
    assert (drafter.session.hidden.first, drafter.session.hidden.end) == (0, len(PROMPT) + told[-1] + 1)


async def test_a_head_without_history_gets_the_newest_rows_only(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter, method=MEDUSA, spec=make_spec(TRUTH[:9]))
    assert await choice.run() == TRUTH[9:]
    assert told_rows(drafter) == list(range(8, drafter.steps[-1].committed_len - 1))


async def test_rows_that_a_cached_prefix_has_lost_are_not_waited_for(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter, method=EAGLE)
    choice.verifier.hidden_from = -4
    assert await choice.run() == TRUTH
    assert told_rows(drafter)[0] == -4
    assert len(choice.verifier.steps) == 1 + -(-(LENGTH - 1) // 5)


@pytest.mark.parametrize("lost_from", [-len(PROMPT), -1, 5])
async def test_what_the_drafter_lacks_comes_again(make: Callable[..., Choice], lost_from: int) -> None:
    async def lose_rows(drafter: PlainDrafter, step: DraftStep) -> ProposalReply | None:
        if len(drafter.steps) != 3:
            return None
        assert drafter.session is not None
        drafter.session.hidden.cut_back(len(PROMPT) + lost_from)
        return drafter.reply(step, (), missing=lost_from)

    drafter = PlainDrafter(lose_rows)
    choice = make(drafter, method=EAGLE)
    assert await choice.run() == TRUTH
    told = told_rows(drafter)
    lost_at = drafter.steps[2].committed_len - 1
    assert told == [*range(-len(PROMPT), lost_at), *range(lost_from, drafter.steps[-1].committed_len - 1)]
    assert choice.count("drafters_lost") == 0


@pytest.mark.parametrize("method", [NGRAM, MEDUSA, EAGLE], ids=lambda method: method.name)
async def test_hidden_states_are_asked_for_only_with_a_drafter_that_wants_them(
    make: Callable[..., Choice], method: DraftMethodInfo
) -> None:
    choice = make(None, PlainDrafter(), method=method, spec=make_spec(TRUTH[:3]))
    assert await choice.run() == TRUTH[3:]
    requests = [step.hidden_states for step in choice.verifier.steps]
    assert requests[0] is None, "nobody was there yet"
    joined_at = 3 + ALONE_RUN
    expected = {
        "ngram": None,
        "medusa": HiddenStatesRequest(MEDUSA.hidden_layers, joined_at - 1),
        "eagle3": HiddenStatesRequest(EAGLE.hidden_layers, -len(PROMPT)),
    }[method.name]
    assert requests[1] == expected


async def test_rows_gather_while_the_drafter_is_late_and_a_late_loss_is_made_good(make: Callable[..., Choice]) -> None:
    """Rows came and were not handed over when the late reply says that older ones are gone."""
    gate = asyncio.Event()

    async def late_loss(drafter: PlainDrafter, step: DraftStep) -> ProposalReply | None:
        if len(drafter.steps) != 2:
            return None
        await gate.wait()
        assert drafter.session is not None
        drafter.session.hidden.cut_back(4)
        return drafter.reply(step, (1,), missing=4 - len(PROMPT))

    drafter = PlainDrafter(late_loss)
    choice = make(drafter, method=EAGLE, timeout_s=0.03)
    choice.verifier.forward_s = 0.001
    running = asyncio.create_task(choice.run())
    await choice.until_late()
    gate.set()
    assert await running == TRUTH
    assert drafter.session is not None
    assert len(drafter.steps) > 3
    hidden = drafter.session.hidden
    # What lies before it has been used; it was dropped when rows after a gap came first.
    assert hidden.first == 4
    assert hidden.end == len(PROMPT) + drafter.steps[-1].committed_len - 1
    flat = hidden.rows(4, hidden.end)[:, 0] - 1000
    assert flat.tolist() == list(range(4 - len(PROMPT), drafter.steps[-1].committed_len - 1))


# ---- the drafting alone, driven by hand ----


def plain_commit(base_len: int, num_tokens: int = 1) -> Commit:
    return Commit(1, base_len, TRUTH[base_len : base_len + num_tokens], (), more=False)


def observe(drafting: Drafting, answer: Answer, base_len: int, num_tokens: int = 1) -> None:
    drafting.observe(answer, plain_commit(base_len, num_tokens), 0.01)


async def test_each_step_reports_what_was_committed_since_the_last(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter)
    committed: list[int] = []
    drafting = choice.drafting(committed)
    answer = await drafting.propose(0)
    assert answer.proposal is None
    assert drafter.steps == [], "the prefill's round: it was opened, not asked"
    assert drafter.session is not None
    for base_len, num_tokens in ((0, 1), (1, 5), (6, 2)):
        committed.extend(TRUTH[base_len : base_len + num_tokens])
        observe(drafting, answer, base_len, num_tokens)
        answer = await drafting.propose(base_len + num_tokens)
        assert answer.proposal is not None
        assert answer.proposal.base_len == base_len + num_tokens
    assert [(step.base_len, step.committed_token_ids) for step in drafter.steps] == [
        (0, TRUTH[:1]),
        (1, TRUTH[1:6]),
        (6, TRUTH[6:8]),
    ]
    await drafting.close()
    await drafting.close()
    assert (choice.num_acquired, choice.num_released, drafter.num_closed) == (1, 1, 1)


async def test_a_tree_is_asked_for_where_the_request_wants_one(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter, plan=DraftPlan("ngram", 6, token_tree=True))
    drafting = choice.drafting(list(TRUTH[:2]))
    await drafting.propose(2)
    assert (drafter.steps[0].num_draft_tokens, drafter.steps[0].max_tree_nodes) == (6, 6)
    await drafting.close()


async def test_a_late_answer_is_not_asked_for_twice(make: Callable[..., Choice]) -> None:
    gate = asyncio.Event()

    async def wait(drafter: PlainDrafter, _step: DraftStep) -> None:
        if len(drafter.steps) == 1:
            await gate.wait()

    drafter = PlainDrafter(wait)
    choice = make(drafter, timeout_s=0.02)
    committed = list(TRUTH[:1])
    drafting = choice.drafting(committed)
    answer = await drafting.propose(1)
    for base_len in range(1, 6):
        assert (answer.proposal, answer.max_new_tokens) == (None, ALONE_RUN)
        committed.append(TRUTH[base_len])
        observe(drafting, answer, base_len)
        answer = await drafting.propose(base_len + 1)
    assert answer.proposal is None
    assert len(drafter.steps) == 1
    assert choice.count("draft_timeouts") == 1
    gate.set()
    await asyncio.sleep(0)
    proposal = (await drafting.propose(6)).proposal
    assert proposal is not None
    assert proposal.token_ids == TRUTH[6:10]
    assert drafter.steps[1] == DraftStep(1, 1, TRUTH[1:6], 4)
    await drafting.close()


async def test_a_late_drafter_that_has_died_is_replaced_at_once(make: Callable[..., Choice]) -> None:
    gate = asyncio.Event()

    async def die(_drafter: PlainDrafter, _step: DraftStep) -> None:
        await gate.wait()
        raise DrafterLost("gone")

    first, second = PlainDrafter(die), PlainDrafter()
    choice = make(first, second, timeout_s=0.02)
    drafting = choice.drafting(list(TRUTH[:3]))
    assert (await drafting.propose(3)).proposal is None
    gate.set()
    await asyncio.sleep(0.01)
    assert (await drafting.propose(3)).proposal is not None
    assert (first.num_closed, choice.num_released, choice.count("drafters_lost")) == (1, 1, 1)
    await drafting.close()
    assert (second.num_closed, choice.num_released) == (1, 2)


async def test_closing_ends_a_late_question(make: Callable[..., Choice]) -> None:
    cancelled = asyncio.Event()

    async def hang(_drafter: PlainDrafter, _step: DraftStep) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    drafter = PlainDrafter(hang)
    choice = make(drafter, timeout_s=0.02)
    drafting = choice.drafting(list(TRUTH[:3]))
    await drafting.propose(3)
    assert not cancelled.is_set()
    await drafting.close()
    assert cancelled.is_set()
    assert (drafter.num_closed, choice.num_released) == (1, 1)


async def test_an_answer_without_tokens_is_no_proposal_but_was_asked_for(make: Callable[..., Choice]) -> None:
    async def nothing(drafter: PlainDrafter, step: DraftStep) -> ProposalReply:
        return drafter.reply(step, ())

    choice = make(PlainDrafter(nothing))
    committed = list(TRUTH[:3])
    drafting = choice.drafting(committed)
    answer = await drafting.propose(3)
    assert (answer.proposal, answer.max_new_tokens) == (None, 1)
    observe(drafting, answer, 3)
    assert draft_rounds(choice) == (0, 1, 0)
    await drafting.close()


# ---- the share that drafters are scaled by ----


def draft_rounds(choice: Choice) -> tuple[float, ...]:
    """As a scrape reads them: a draft came, none did although the drafter answered, nobody answered."""
    families = choice.metrics.registry.collect()
    samples = {
        sample.labels["draft"]: sample.value
        for family in families
        for sample in family.samples
        if sample.name == "outrider:draft_rounds_total"
    }
    return samples["yes"], samples["empty"], samples["no"]


async def test_a_round_says_whether_the_wanted_draft_came(make: Callable[..., Choice]) -> None:
    async def once_nothing_then_lost(drafter: PlainDrafter, step: DraftStep) -> ProposalReply | None:
        if len(drafter.steps) == 3:
            raise DrafterLost("gone")
        return drafter.reply(step, ()) if len(drafter.steps) == 2 else None

    choice = make(PlainDrafter(once_nothing_then_lost), None)
    assert draft_rounds(choice) == (0, 0, 0)
    drafting = choice.drafting(committed := list(TRUTH[:1]))
    expected = [(1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 1, 2)]
    for base_len, rounds in enumerate(expected, 1):
        answer = await drafting.propose(base_len)
        observe(drafting, answer, base_len)
        committed.append(TRUTH[base_len])
        assert draft_rounds(choice) == rounds
    observe(drafting, answer, 5)
    assert draft_rounds(choice) == (1, 1, 3), "the free run of the last answer goes on"
    await drafting.close()


@pytest.mark.parametrize("plan", [None, DraftPlan("auto", 4)], ids=["off", "the verifier wants nothing"])
async def test_rounds_that_want_no_draft_do_not_count(make: Callable[..., Choice], plan: DraftPlan | None) -> None:
    choice = make(PlainDrafter(), plan=plan)
    assert await choice.run() == TRUTH
    assert draft_rounds(choice) == (0, 0, 0)


async def test_nor_do_the_prefill_and_what_brings_hidden_states(make: Callable[..., Choice]) -> None:
    choice = make(PlainDrafter(), method=EAGLE)
    choice.verifier.max_hidden_rows = 3
    assert await choice.run() == TRUTH
    num_asked = len(choice.drafters[0].steps)
    assert len(choice.verifier.steps) > num_asked + 2
    assert draft_rounds(choice) == (num_asked, 0, 0)


async def test_a_drafter_that_is_late_counts_until_it_answers(make: Callable[..., Choice]) -> None:
    async def hang(_drafter: PlainDrafter, _step: DraftStep) -> None:
        await asyncio.Event().wait()

    choice = make(PlainDrafter(hang), timeout_s=0.02)
    assert await choice.run() == TRUTH
    assert draft_rounds(choice) == (0, 0, LENGTH - 1)


AUTO = DraftPlan("auto", 8, offers=lambda: (DrafterOffer("ngram", 16),))


async def test_the_verifier_is_told_what_it_may_choose_from_once(make: Callable[..., Choice]) -> None:
    choice = make(PlainDrafter(), plan=AUTO)
    assert await choice.run() == TRUTH
    [step] = choice.verifier.steps
    assert step.auto_drafts == AutoDrafts(8, drafters=(DrafterOffer("ngram", 16),))
    assert (step.max_new_tokens, step.last_draft, choice.num_acquired) == (LENGTH, None, 0)


async def test_what_the_verifier_wants_is_asked_for_and_it_is_told_what_came_of_it(make: Callable[..., Choice]) -> None:
    async def think(drafter: PlainDrafter, step: DraftStep) -> ProposalReply:
        await asyncio.sleep(0.01)
        reply = drafter.reply(step, TRUTH[step.committed_len :][: step.num_draft_tokens])
        return replace(reply, timings=replace(reply.timings, total_us=4_000))

    drafter = PlainDrafter(think)
    choice = make(drafter, plan=AUTO)
    choice.verifier.wants = (NextDraft("ngram", 3, 10**7), NextDraft("ngram", 5, 10**7), None)
    assert await choice.run() == TRUTH
    assert [step.num_draft_tokens for step in drafter.steps] == [3, 5]
    first, second, third, rest = choice.verifier.steps
    assert [step.auto_drafts is not None for step in choice.verifier.steps] == [True, False, False, False]
    assert (first.proposal, first.last_draft) == (None, None)
    for step, length in ((second, 3), (third, 5)):
        assert step.proposal is not None
        assert len(step.proposal.token_ids) == length
        assert step.last_draft is not None
        assert (step.last_draft.drafter_us, step.last_draft.late, step.last_draft.refused) == (4_000, False, "")
        assert step.last_draft.waited_us >= 10_000
    assert (rest.proposal, rest.last_draft, rest.max_new_tokens) == (None, None, LENGTH)


async def test_a_draft_is_waited_for_as_long_as_the_verifier_says(make: Callable[..., Choice]) -> None:
    async def slow(_drafter: PlainDrafter, _step: DraftStep) -> None:
        await asyncio.sleep(0.05)

    choice = make(PlainDrafter(slow), plan=AUTO)
    choice.verifier.wants, choice.verifier.forward_s = (NextDraft("ngram", 3, 1_000),), 0.002
    assert await choice.run() == TRUTH
    late = choice.verifier.steps[1]
    assert (late.proposal, late.max_new_tokens) == (None, ALONE_RUN)
    assert late.last_draft is not None
    assert late.last_draft.late
    assert late.last_draft.waited_us >= 1_000
    assert choice.count("draft_timeouts") == 0, "it was not worth waiting for, which is no fault of the drafter's"


async def test_where_nobody_can_be_asked_the_verifier_is_told_why(make: Callable[..., Choice]) -> None:
    choice = make(None, plan=AUTO)
    choice.verifier.wants = (NextDraft("ngram", 3, 10**7),)
    assert await choice.run() == TRUTH
    refused = [step.last_draft.refused for step in choice.verifier.steps if step.last_draft is not None]
    assert refused
    assert set(refused) == {"no drafter has room"}


async def test_a_new_session_opens_what_the_verifier_has_last_wanted(make: Callable[..., Choice]) -> None:
    """So that the drafter reads the prompt while the verifier does."""
    drafter, hint = PlainDrafter(), DraftHint(NextDraft("ngram", 3, 10**7))
    choice = make(drafter, plan=AUTO)
    drafting = Drafting(choice.spec, [], choice.acquire, AUTO, timeout_s=1.0, metrics=choice.metrics, hint=hint)
    assert (await drafting.propose(0)).max_new_tokens == LENGTH
    assert (drafter.session is not None, drafter.steps) == (True, [])
    await drafting.close()
    assert choice.num_released == 1


async def test_a_session_that_takes_over_tells_its_drafter_everything(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter, spec=make_spec(TRUTH[:7], epoch=5))
    drafting = choice.drafting(list(TRUTH[:7]))
    assert (await drafting.propose(7)).proposal is not None
    assert drafter.session is not None
    assert drafter.session.spec == replace(choice.spec, method="ngram")
    assert drafter.steps == [DraftStep(5, 7, (), 4)]
    await drafting.close()


async def test_rows_that_nobody_asked_for_are_not_handed_on(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter)
    committed = list(TRUTH[:2])
    drafting = choice.drafting(committed)
    commit = replace(plain_commit(1), hidden_states=hidden_rows((1,), 0, 1))
    drafting.observe(await drafting.propose(2), commit, 0.01)
    await drafting.propose(2)
    assert [step.hidden_states for step in drafter.steps] == [(), ()]
    await drafting.close()


async def test_an_output_of_one_token_opens_no_drafter(make: Callable[..., Choice]) -> None:
    choice = make(PlainDrafter())
    choice.spec = replace(choice.spec, sampling_params=replace(choice.spec.sampling_params, max_tokens=1))
    drafting = choice.drafting([])
    answer = await drafting.propose(0)
    await drafting.close()
    assert (answer.proposal, answer.max_new_tokens) == (None, 1)
    assert choice.num_acquired == 0
