"""A session whose verifier drafts by itself: what it is asked for, how it is steered, what the policy hears of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from in_process import LENGTH, TRUTH, Choice, PlainDrafter, RecordingPolicy, make_spec, maker

from outrider.gateway.draft_length.draft_policy import FixedDraftLength
from outrider.gateway.proposals.ask import Answer, Ask
from outrider.gateway.proposals.drafting import DECISION_TOKENS
from outrider.gateway.proposals.local_source import LocalMethods, LocalSource
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.messages import Commit, DraftMethodInfo, LocalDrafts, SteerRun, Timings

METHODS = {name: DraftMethodInfo(name, proposes_trees=name != "ngram") for name in ("ngram", "draft_model")}
HERE = LocalMethods("verifier:7001", METHODS)


@dataclass
class Script(RecordingPolicy):
    """Another answer each time that it is asked; the last one again and again."""

    answers: tuple[tuple[str, int], ...] = ()
    num_asked: int = 0

    def num_draft_tokens(self, *, before_prefill: bool = False) -> int:
        self.method, length = self.answers[min(self.num_asked, len(self.answers) - 1)]
        self.num_asked += 1
        return length


@pytest.fixture
def make(tokenizer: Tokenizer) -> Callable[..., Choice]:
    return maker(tokenizer, local=HERE)


async def test_one_run_and_nobody_else_is_asked(make: Callable[..., Choice]) -> None:
    choice = make(None, policy=FixedDraftLength(3, "draft_model"))
    assert await choice.run() == TRUTH
    [step] = choice.verifier.steps
    assert step.proposal is None
    assert (step.local_drafts, step.max_new_tokens) == (LocalDrafts("draft_model", 3), LENGTH)
    assert (choice.num_acquired, choice.verifier.steered) == (0, [])


async def test_the_policy_steers_the_run_while_it_goes_on(make: Callable[..., Choice]) -> None:
    answers = (("ngram", 3), ("ngram", 3), ("ngram", 2), ("draft_model", 2), ("draft_model", 0), ("draft_model", 0))
    policy = Script(answers=(*answers, ("draft_model", 1)), run_len=1000)
    choice = make(None, policy=policy)
    assert await choice.run() == TRUTH
    assert len(choice.verifier.steps) == 1
    drafts = [steer.local_drafts for steer in choice.verifier.steered]
    assert drafts == [LocalDrafts("ngram", 2), LocalDrafts("draft_model", 2), None, LocalDrafts("draft_model", 1)]
    assert not any(steer.ends for steer in choice.verifier.steered)
    drafted = float(choice.metrics._draft_rounds.labels("yes")._value.get())
    assert drafted == sum(outcome.num_draft_tokens > 0 for outcome in policy.outcomes) < len(policy.outcomes)
    # At the start, after the prefill, and then after every few tokens, of which a round may bring some more.
    assert LENGTH // (DECISION_TOKENS + 3) <= policy.num_asked - 2 <= LENGTH // DECISION_TOKENS


async def test_what_was_said_before_the_prefill_holds_until_it_is_done(make: Callable[..., Choice]) -> None:
    """Its commit tells how many sessions have come together."""
    choice = make(None, policy=Script(answers=(("ngram", 5), ("ngram", 2)), run_len=1000))
    assert await choice.run() == TRUTH
    assert [steer.local_drafts for steer in choice.verifier.steered] == [LocalDrafts("ngram", 2)]
    num_drafts = [outcome.num_draft_tokens for outcome in choice.policy.outcomes]
    assert num_drafts[:2] == [0, 2]


async def test_a_plain_run_is_steered_too(make: Callable[..., Choice]) -> None:
    choice = make(None, policy=Script(answers=(("ngram", 0), ("ngram", 0), ("ngram", 4)), run_len=1000))
    assert await choice.run() == TRUTH
    [step], [steer] = choice.verifier.steps, choice.verifier.steered
    assert (step.local_drafts, step.max_new_tokens) == (None, LENGTH)
    assert steer == SteerRun(1, LocalDrafts("ngram", 4))


async def test_a_method_of_a_drafter_ends_the_run(make: Callable[..., Choice]) -> None:
    drafter = PlainDrafter()
    choice = make(drafter, policy=Script(answers=(("ngram", 2), ("suffix", 3)), run_len=1000))
    assert await choice.run() == TRUTH
    assert choice.verifier.steered == [SteerRun(1, ends=True)]
    assert choice.verifier.steps[0].local_drafts == LocalDrafts("ngram", 2)
    assert all(step.proposal is not None for step in choice.verifier.steps[1:-1])
    assert drafter.steps


async def test_a_run_that_is_left_to_a_drafter_is_asked_for_no_more(make: Callable[..., Choice]) -> None:
    policy = Script(answers=(("ngram", 2), ("suffix", 3)), run_len=1000)
    choice = make(None, policy=policy)  # nobody has the method
    assert await choice.run() == TRUTH
    assert choice.verifier.steered.count(SteerRun(1, ends=True)) == 1


async def test_the_policy_hears_of_every_round(make: Callable[..., Choice]) -> None:
    policy = RecordingPolicy(length=4, run_len=1000, method="draft_model")
    choice = make(None, policy=policy)
    assert await choice.run() == TRUTH
    first, second, *others = policy.outcomes
    assert others[-1].num_beyond_end == 4 - others[-1].num_asked > 0
    assert not any(outcome.num_beyond_end for outcome in policy.outcomes[:-1])
    assert (first.num_asked, first.method, first.draft_depth, first.verify_s) == (0, "", 0, 0.0)
    assert (second.is_catch_up, others[0].is_catch_up) == (True, False)
    for outcome in (second, *others[:-1]):
        assert (outcome.num_asked, outcome.num_draft_tokens, outcome.num_accepted) == (4, 4, 4)
        assert (outcome.method, outcome.draft_depth, outcome.overhead_s) == ("draft_model", 8, 0.0)
        # For drafts of eight tokens, of which this session asked for four; the verifier's 3 ms hold them.
        assert outcome.draft_s == pytest.approx(0.002)
        assert outcome.verify_s == pytest.approx(0.001)


async def test_commits_say_who_drafted(make: Callable[..., Choice]) -> None:
    choice = make(None, policy=FixedDraftLength(3, "ngram"))
    drafting = choice.drafting([])
    answer = await drafting.propose(0)
    commit = Commit(1, 0, (5, 6), (), num_draft_tokens=3, local_drafts=LocalDrafts("ngram", 3))
    signed = drafting.signed(answer, commit)
    assert (signed.drafter, signed.draft_method) == ("verifier:7001", "ngram")


async def test_without_a_policy_nothing_is_asked_for(make: Callable[..., Choice]) -> None:
    choice = make(None, policy=None)
    assert await choice.run() == TRUTH
    assert [step.local_drafts for step in choice.verifier.steps] == [None]
    assert choice.verifier.steered == []


def test_what_is_asked_for() -> None:
    source = LocalSource(make_spec(), HERE, token_tree=True)
    assert source.drafts(Ask(0, "draft_model", 4)) == LocalDrafts("draft_model", 4, token_tree=True)
    assert source.drafts(Ask(0, "ngram", 4)) == LocalDrafts("ngram", 4)  # it has chains alone
    assert source.drafts(Ask(0, "suffix", 4)) is None
    assert source.drafts(Ask(0, "ngram", 0)) is None


def test_a_method_that_comes_back_has_read_nothing_meanwhile() -> None:
    source = LocalSource(make_spec(), HERE, token_tree=False)
    commit = Commit(1, 10, (1, 2), (), timings=Timings(draft_us=5))
    seen = []
    for method, base_len in (("ngram", 10), ("ngram", 12), ("draft_model", 14), ("ngram", 60), ("ngram", 62)):
        commit = replace(commit, base_len=base_len, local_drafts=LocalDrafts(method, 3))
        seen.append(source.drafted(Answer(Ask(10)), commit).is_catch_up)
    assert seen == [True, False, True, True, False]


def test_a_verifier_that_has_not_been_looked_at_serves_no_method() -> None:
    assert LocalMethods.of("v:1", None).methods == {}
