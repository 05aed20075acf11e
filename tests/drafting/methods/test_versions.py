"""Versions of a method: who drafts with which, and when one is let go."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.methods.versions import VersionedMethod
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

# Of 5: the last 1-gram was followed by 6; of 7, 5: the last 2-gram by 8.
PROMPT = (7, 5, 8, 1, 5, 6, 2, 7, 5)
LONGEST, NEAREST = (8,), (6,)


def of_longest() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=2)


def of_nearest() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=1)


def opened(method: VersionedMethod) -> DraftSession:
    spec = SessionSpec("s", 1, PROMPT, (), SamplingParams(temperature=0.0), SpeculationMode.EXACT, 0)
    session = DraftSession(spec, list(PROMPT), lambda _reply: None)
    method.open(session)
    session.report(DraftStep(1, 0, (), 1))
    return session


def drafts(method: VersionedMethod, sessions: Sequence[DraftSession]) -> list[tuple[int, ...]]:
    return [proposal.token_ids for proposal in method.propose(sessions)]


def test_the_two_would_draft_differently() -> None:
    assert drafts(VersionedMethod(of_longest()), []) == []
    found = [drafts(method, [opened(method)]) for method in map(VersionedMethod, (of_longest(), of_nearest()))]
    assert found == [[LONGEST], [NEAREST]]


def test_an_open_session_keeps_its_version_and_answers_stay_in_order() -> None:
    method = VersionedMethod(of_longest())
    first = opened(method)
    method.swap(of_nearest())
    second = opened(method)
    method.swap(of_longest())
    third = opened(method)
    assert drafts(method, [second, first, third]) == [NEAREST, LONGEST, LONGEST]
    assert method.info.version == 3


def test_a_version_goes_with_its_last_session() -> None:
    method = VersionedMethod(of_longest())
    sessions = [opened(method), opened(method)]
    method.swap(of_nearest())
    assert method.num_kept == 2
    method.close(sessions[0])
    assert method.num_kept == 2
    method.close(sessions[1])
    method.close(sessions[1])
    assert method.num_kept == 1
    assert method.info.version == 2


def test_swap_returns_what_was_newest() -> None:
    first = of_longest()
    method = VersionedMethod(first)
    assert method.swap(of_nearest()) is first
