"""A session whose verifier drafts by itself: what it is asked for, and who is said to have drafted."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from in_process import LENGTH, TRUTH, Choice, PlainDrafter, maker

from outrider.gateway.proposals.ask import DraftPlan, LocalMethods
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.messages import Commit, DraftMethodInfo, LocalDrafts

METHODS = {name: DraftMethodInfo(name, proposes_trees=name != "ngram") for name in ("ngram", "draft_model")}
HERE = LocalMethods("verifier:7001", METHODS)


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Choice]:
    return maker(tokenizer, local=HERE)


async def test_one_run_and_nobody_else_is_asked(make: Callable[..., Choice]) -> None:
    choice = make(None, plan=DraftPlan("draft_model", 3))
    assert await choice.run() == TRUTH
    [step] = choice.verifier.steps
    assert step.proposal is None
    assert (step.local_drafts, step.auto_drafts) == (LocalDrafts("draft_model", 3), None)
    assert (step.max_new_tokens, choice.num_acquired) == (LENGTH, 0)
    drafted = float(choice.metrics._draft_rounds.labels("yes")._value.get())
    assert drafted == -(-(LENGTH - 1) // 4), "every round but the prefill's"


@pytest.mark.parametrize(("method", "has_trees"), [("draft_model", True), ("ngram", False)])
async def test_trees_are_asked_for_where_the_method_has_them(
    make: Callable[..., Choice], method: str, has_trees: bool
) -> None:
    drafting = make(None, plan=DraftPlan(method, 4, token_tree=True)).drafting([])
    assert (await drafting.propose(0)).local_drafts == LocalDrafts(method, 4, has_trees)


async def test_a_method_that_the_verifier_does_not_serve_is_asked_of_a_drafter(make: Callable[..., Choice]) -> None:
    choice = make(drafter := PlainDrafter(), plan=DraftPlan("suffix", 3))
    assert await choice.run() == TRUTH
    assert {step.local_drafts for step in choice.verifier.steps} == {None}
    assert drafter.steps


async def test_commits_say_who_drafted(make: Callable[..., Choice]) -> None:
    choice = make(None, plan=DraftPlan("ngram", 3))
    drafting = choice.drafting([])
    answer = await drafting.propose(0)
    commit = Commit(1, 0, (5, 6), (), num_draft_tokens=3, local_drafts=LocalDrafts("ngram", 3))
    signed = drafting.signed(answer, commit)
    assert (signed.drafter, signed.draft_method) == ("verifier:7001", "ngram")


async def test_without_a_plan_nothing_is_asked_for(make: Callable[..., Choice]) -> None:
    choice = make(None, plan=None)
    assert await choice.run() == TRUTH
    assert [(step.local_drafts, step.auto_drafts) for step in choice.verifier.steps] == [(None, None)]


def test_a_verifier_that_has_not_been_looked_at_serves_no_method() -> None:
    assert LocalMethods.of("v:1", None).methods == {}
