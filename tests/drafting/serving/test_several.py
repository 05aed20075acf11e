"""Several heads of a kind: each session has one, what they drafted is counted, and what does not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.serving.several import DraftHeadMetrics, SeveralHeads
from outrider.drafting.session import DraftSession
from outrider.shared.errors import ConfigError
from outrider.shared.messages import DraftMethodInfo, DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

# Of 5: the last 1-gram was followed by 6; of 7, 5: the last 2-gram by 8.
PROMPT = (7, 5, 8, 1, 5, 6, 2, 7, 5)
DRAFTS = {"longest": (8, 1), "nearest": (6, 2)}


def several() -> SeveralHeads:
    return SeveralHeads(
        {
            "longest": NgramMethod(prompt_lookup_min=1, prompt_lookup_max=2),
            "nearest": NgramMethod(prompt_lookup_min=1, prompt_lookup_max=1),
        }
    )


def opened(method: SeveralHeads, num_draft_tokens: int = 2) -> DraftSession:
    spec = SessionSpec("s", 1, PROMPT, (), SamplingParams(temperature=0.0), SpeculationMode.EXACT, 0)
    session = DraftSession(spec, list(PROMPT), lambda _reply: None)
    method.open(session)
    session.report(DraftStep(1, 0, (), num_draft_tokens))
    return session


def head_of(method: SeveralHeads, session: DraftSession) -> str:
    return method._bound[id(session)].head


def test_each_session_keeps_its_head_and_proposals_stay_in_order() -> None:
    method = several()
    sessions = [opened(method) for _ in range(12)]
    heads = [head_of(method, session) for session in sessions]
    assert set(heads) == set(DRAFTS)
    for _ in range(3):
        assert [proposal.token_ids for proposal in method.propose(sessions)] == [DRAFTS[head] for head in heads]


def test_what_was_accepted_is_counted_once_the_tokens_are_committed() -> None:
    method, registry = several(), CollectorRegistry()
    DraftHeadMetrics(registry, {"ngram": method})
    accepted = {"longest": 0, "nearest": 0}
    sessions = {"longest": 0, "nearest": 0}
    for _ in range(20):
        session = opened(method)
        head = head_of(method, session)
        method.propose([session])
        session.report(DraftStep(1, 0, (8, 9), 0))  # of (8, 1) the first is right, of (6, 2) none
        method.close(session)
        accepted[head] += head == "longest"
        sessions[head] += 1
    assert all(sessions.values())
    for head in method.info.heads:
        assert (head.num_sessions, head.num_drafts) == (sessions[head.name], sessions[head.name])
        assert head.num_accepted_tokens == accepted[head.name]
        labels = {"method": "ngram", "head": head.name}
        assert registry.get_sample_value("outrider:draft_head_accepted_tokens_total", labels) == accepted[head.name]
    assert sessions["longest"] > sessions["nearest"]


def test_a_draft_whose_tokens_are_not_committed_yet_says_nothing() -> None:
    method = several()
    session = opened(method)
    method.propose([session])
    method.close(session)
    method.close(session)
    assert sum(head.num_drafts for head in method.info.heads) == 0
    assert sum(head.num_sessions for head in method.info.heads) == 1


@pytest.mark.parametrize(
    ("committed", "num_accepted"), [((8, 3, 9), 2), ((8, 1), 2), ((6, 2), 1), ((8, 9), 1), ((4, 4), 0), ((8,), 1)]
)
def test_in_a_tree_the_longest_path_counts(committed: Sequence[int], num_accepted: int) -> None:
    method = several()
    session = opened(method)
    #  8 -> 1, 3;  6 -> 5
    tree = Proposal(0, (8, 6, 1, 3, 5), "ngram", parents=(-1, -1, 0, 0, 1))
    method._bound[id(session)].asked = tree
    session.report(DraftStep(1, 0, tuple(committed), 0))
    method.close(session)
    assert sum(head.num_accepted_tokens for head in method.info.heads) == num_accepted


class Failing(NgramMethod):
    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        raise RuntimeError("no draft")


def test_a_head_that_fails_gets_no_new_session() -> None:
    good = NgramMethod(prompt_lookup_min=1, prompt_lookup_max=2)
    method = SeveralHeads({"bad": Failing(prompt_lookup_min=1, prompt_lookup_max=2), "good": good})
    sessions = [opened(method) for _ in range(10)]
    with pytest.raises(RuntimeError, match="no draft"):
        method.propose(sessions)
    assert {head_of(method, opened(method)) for _ in range(20)} == {"good"}


def test_heads_of_other_shapes_are_refused_by_name() -> None:
    heads = {name: NgramMethod(prompt_lookup_min=1, prompt_lookup_max=2) for name in ("code", "chat")}
    heads["chat"].info = replace(heads["chat"].info, hidden_layers=(1,))
    with pytest.raises(ConfigError, match="chat has the shape"):
        SeveralHeads(heads)


def test_the_method_says_what_its_heads_are() -> None:
    info = several().info
    assert info.name == "ngram"
    assert info.model == "longest=,nearest="
    assert [head.name for head in info.heads] == ["longest", "nearest"]
    assert isinstance(info, DraftMethodInfo)
