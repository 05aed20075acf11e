"""`auto` decided at the verifier: what it drafts itself, what it asks of drafters, and that no token depends on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from outrider.drafting.session import DraftSession
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.shared.draft_policy.draft_methods import PREDICTION
from outrider.shared.messages import AutoDrafts, Commit, DrafterOffer, LastDraft, NextDraft, Proposal
from outrider.verifier_service.draft_length.limits import PLAIN_ROUNDS
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.drafting.spy_method import Spy, engine_with
from tests.verifier_service.engine_client import PARAMS, PROMPT, Session, make_spec, tokens_of

LOCAL = AutoDrafts(4)
REMOTE = AutoDrafts(4, drafters=(DrafterOffer("ngram", 3),))
NUM_REQUESTS = 6


def decode(
    engine: VerifierEngine,
    right: Sequence[int],
    auto: AutoDrafts,
    name: str,
    *,
    is_late: bool = False,
    predicted: tuple[int, ...] = (),
) -> list[Commit]:
    """A request as a gateway decodes it, whose drafter is always right. predicted: the request's prediction."""
    commits: list[Commit] = []
    output: tuple[int, ...] = ()
    wanted: NextDraft | None = None
    with Session(engine, replace(make_spec(PROMPT, PARAMS[name]), predicted_token_ids=predicted)) as session:
        while not commits or commits[-1].finish_reason is None:
            proposal, last = None, None
            if wanted is not None:
                last = LastDraft(1_000, 500, late=is_late)
                draft = tuple(right[len(output) : len(output) + wanted.num_draft_tokens])
                proposal = Proposal(len(output), draft, wanted.method) if draft and not is_late else None
            run = 0 if proposal is not None else 1_000
            told = auto if not commits else None
            commits += session.step(len(output), proposal, run, auto=told, last=last)
            wanted, output = commits[-1].next_draft, tokens_of(commits)
    return commits


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_a_method_of_its_own_that_is_right_is_used(
    loaded: LoadedModel, certificate: Certificate, truth: Callable, name: str
) -> None:
    right = tokens_of(truth(name, 0))

    def guess(session: DraftSession) -> Sequence[int]:
        assert session.step is not None
        return right[session.committed_len : session.committed_len + session.step.num_draft_tokens]

    with engine_with(Spy(guess), loaded, certificate) as engine:
        found = [decode(engine, right, LOCAL, name) for _ in range(NUM_REQUESTS)]
    assert [tokens_of(commits) for commits in found] == [right] * NUM_REQUESTS
    assert not any(commit.num_draft_tokens for commit in found[0][:PLAIN_ROUNDS]), "plain decoding is measured first"
    # Which request drafts most is a matter of times, which other work on the machine disturbs.
    drafted = max(found, key=lambda commits: sum(commit.num_accepted_tokens for commit in commits))
    assert sum(commit.num_accepted_tokens for commit in drafted) > len(right) // 3
    assert all(commit.next_draft is None for commits in found for commit in commits)
    assert sum(commit.saved_us for commit in drafted) > 0


def test_what_a_drafter_shall_draft_ends_the_run_and_comes_with_its_last_commit(
    engine: VerifierEngine, truth: Callable
) -> None:
    right = tokens_of(truth("greedy", 0))
    found = [decode(engine, right, REMOTE, "greedy") for _ in range(NUM_REQUESTS)]
    assert [tokens_of(commits) for commits in found] == [right] * NUM_REQUESTS
    wanted = [commit.next_draft for commits in found for commit in commits if commit.next_draft is not None]
    assert wanted
    assert {draft.method for draft in wanted} == {"ngram"}
    assert max(draft.num_draft_tokens for draft in wanted) <= 3
    assert all(draft.patience_us > 0 for draft in wanted)
    assert not any(commit.next_draft for commits in found for commit in commits if commit.more)
    assert sum(commit.num_accepted_tokens for commit in found[-1]) > len(right) // 4


def test_a_drafter_that_is_always_late_is_given_up(engine: VerifierEngine, truth: Callable) -> None:
    """By what it costs, which is little a round where the wait is short beside a forward."""
    right = tokens_of(truth("greedy", 0))
    wanted: list[int] = []
    while len(wanted) < 30 * NUM_REQUESTS:
        commits = decode(engine, right, REMOTE, "greedy", is_late=True)
        assert tokens_of(commits) == right
        wanted.append(sum(commit.next_draft is not None for commit in commits))
        if len(wanted) > NUM_REQUESTS and sum(wanted[-NUM_REQUESTS:]) < NUM_REQUESTS * len(right) // 4:
            break
    else:
        pytest.fail(f"it is still asked: {wanted}")
    assert sum(wanted) > 0


def test_without_a_word_of_it_nothing_is_drafted(engine: VerifierEngine, truth: Callable) -> None:
    """Neither for requests that want no drafts nor where there is no method."""
    right = tokens_of(truth("greedy", 0))
    for auto in (AutoDrafts(4), replace(REMOTE, drafters=())):
        commits = decode(engine, right, auto, "greedy")
        assert tokens_of(commits) == right
        assert not any(commit.num_draft_tokens or commit.next_draft for commit in commits)


@pytest.mark.parametrize("name", ["greedy", "sampled"])
@pytest.mark.parametrize("auto", [LOCAL, REMOTE], ids=["no method", "a drafter"])
def test_a_prediction_is_drafted_from_the_first_round_on(
    engine: VerifierEngine, truth: Callable, name: str, auto: AutoDrafts
) -> None:
    """By a verifier that has measured nothing yet, whatever methods there are."""
    right = tokens_of(truth(name, 0))
    commits = decode(engine, right, auto, name, predicted=right)
    assert tokens_of(commits) == right
    assert commits[1].num_accepted_tokens > 0, "the first forward is the prompt's"
    drafted = [commit.local_drafts for commit in commits if commit.local_drafts is not None]
    assert {drafts.method for drafts in drafted} == {PREDICTION}
    assert sum(commit.num_accepted_tokens for commit in commits) > len(right) // 2


@pytest.mark.parametrize("name", ["greedy", "sampled"])
def test_a_wrong_prediction_changes_no_token_and_is_let_go(engine: VerifierEngine, truth: Callable, name: str) -> None:
    right = tokens_of(truth(name, 0))
    wrong = (*right[:2], *((token_id + 1) % 200 for token_id in right[2:]))
    commits = decode(engine, right, LOCAL, name, predicted=wrong)
    assert tokens_of(commits) == right
    drafted = [commit for commit in commits if commit.num_draft_tokens]
    assert drafted
    assert len(drafted) < len(right) // 4
