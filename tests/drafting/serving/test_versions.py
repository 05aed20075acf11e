"""Versions of a method: who drafts with which, and when one is let go."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.serving.versions import TrialResult, VersionedMethod
from outrider.drafting.session import DraftSession
from outrider.shared.messages import DraftStep, Proposal, SessionSpec
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

# Of 5: the last 1-gram was followed by 6; of 7, 5: the last 2-gram by 8.
PROMPT = (7, 5, 8, 1, 5, 6, 2, 7, 5)
LONGEST, NEAREST = (8,), (6,)


def of_longest() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=2)


def of_nearest() -> NgramMethod:
    return NgramMethod(prompt_lookup_min=1, prompt_lookup_max=1)


def opened(method: VersionedMethod, salt: str = "") -> DraftSession:
    params = SamplingParams(temperature=0.0)
    spec = SessionSpec("s", 1, PROMPT, (), params, SpeculationMode.EXACT, 0, cache_salt=salt)
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
    assert method.num_older == 1
    method.close(sessions[0])
    assert method.num_older == 1
    method.close(sessions[1])
    method.close(sessions[1])
    assert method.num_older == 0
    assert method.info.version == 2


def test_swap_returns_what_was_newest() -> None:
    first = of_longest()
    method = VersionedMethod(first)
    assert method.swap(of_nearest()) is first


class Trial:
    """A version on trial, and sessions whose drafts are accepted as `accepted` says of each version."""

    def __init__(self, newest: NgramMethod | None = None) -> None:
        self.before = of_longest()
        self.method = VersionedMethod(self.before)
        self.results: list[TrialResult] = []
        self.method.try_out(newest or of_nearest(), self.results.append)

    def drafted_by_newest(self, session: DraftSession) -> bool:
        return drafts(self.method, [session]) == [NEAREST]

    def rounds(self, num_rounds: int, accepted_of_newest: int, accepted_of_previous: int) -> int:
        """Returns the rounds until there was a result."""
        for number in range(num_rounds):
            session = opened(self.method)
            newest = self.drafted_by_newest(session)
            # Noise of one token up and down, as acceptance has.
            self.method.observe(session, (accepted_of_newest if newest else accepted_of_previous) + number % 3)
            self.method.close(session)
            if self.results:
                return number + 1
        return num_rounds


def test_one_new_session_in_four_is_drafted_for_by_the_version_before() -> None:
    trial = Trial()
    assert sum(trial.drafted_by_newest(opened(trial.method)) for _ in range(40)) == 30
    assert not trial.results


def test_a_poisoned_version_is_taken_back_within_200_rounds() -> None:
    trial = Trial()
    assert trial.rounds(200, accepted_of_newest=0, accepted_of_previous=1) < 200
    [result] = trial.results
    assert not result.is_kept
    assert result.newest.mean < result.previous.mean
    assert drafts(trial.method, [opened(trial.method) for _ in range(8)]) == [LONGEST] * 8
    assert trial.method.info.version == 1
    trial.method.swap(of_nearest())
    assert trial.method.info.version == 3  # no number is given twice


def test_a_broken_version_is_taken_back_before_any_session_has_ended() -> None:
    trial = Trial()
    sessions = [opened(trial.method) for _ in range(4)]
    for number in range(50):
        for session in sessions:
            if not trial.results:
                trial.method.observe(session, 0 if trial.drafted_by_newest(session) else 1 + number % 2)
    assert [result.is_kept for result in trial.results] == [False]


def test_one_text_that_nothing_drafts_does_not_make_a_version_broken() -> None:
    """As a table of numbers, beside three texts of which each round accepts a token or two."""
    trial = Trial()
    sessions = [opened(trial.method) for _ in range(4)]
    for number in range(200):
        for place, session in enumerate(sessions):
            if place in (0, 3):
                trial.method.observe(session, 0 if place == 0 else 2 + number % 2)
    assert not trial.results


def test_one_text_that_drafts_badly_does_not_take_a_version_back() -> None:
    """Rounds of a text are alike: a hundred of them say little more than one."""
    kept = 0
    noise = random.Random(1)
    for _ in range(40):
        trial = Trial()
        while not trial.results:
            session = opened(trial.method)
            level = noise.choice([0, 1, 3])
            for _ in range(30):
                if not trial.results:
                    trial.method.observe(session, level)
            trial.method.close(session)
        kept += trial.results[0].is_kept
    assert kept > 34


def test_a_version_as_good_as_the_one_before_stands_its_trial() -> None:
    trial = Trial()
    trial.rounds(1000, accepted_of_newest=1, accepted_of_previous=1)
    assert [result.is_kept for result in trial.results] == [True]
    assert drafts(trial.method, [opened(trial.method) for _ in range(8)]) == [NEAREST] * 8
    assert trial.method.info.version == 2


class Failing(NgramMethod):
    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        raise RuntimeError("a matrix of the wrong shape")


def test_a_version_that_fails_is_taken_back_at_once() -> None:
    trial = Trial(Failing(prompt_lookup_min=1, prompt_lookup_max=1))
    with pytest.raises(RuntimeError):
        trial.method.propose([opened(trial.method)])
    assert [result.is_kept for result in trial.results] == [False]
    assert drafts(trial.method, [opened(trial.method)]) == [LONGEST]


def test_another_version_ends_a_trial() -> None:
    for change in (VersionedMethod.swap, lambda method, new: method.try_out(new, lambda _: None)):
        trial = Trial()
        change(trial.method, of_longest())
        assert [result.is_kept for result in trial.results] == [False]
        assert trial.method.info.version == 3


def test_neither_a_version_on_trial_nor_the_one_before_is_an_older_one() -> None:
    trial = Trial()
    sessions = [opened(trial.method) for _ in range(8)]
    assert [trial.drafted_by_newest(session) for session in sessions].count(False) == 2
    assert trial.method.num_older == 0
    trial.method.swap(of_longest())
    assert trial.method.num_older == 2


def test_a_salts_versions_draft_for_no_other_session() -> None:
    method, results = VersionedMethod(of_longest()), list[TrialResult]()
    before = opened(method, "mine")
    info = method.try_out(of_nearest(), results.append, "mine")
    assert (info.version, method.info.version) == (2, 1)
    mine = [opened(method, "mine") for _ in range(8)]
    others = [opened(method, salt) for salt in ("", "other") for _ in range(8)]
    assert drafts(method, [before, *mine, *others]) == [LONGEST, *([NEAREST] * 3 + [LONGEST]) * 2, *[LONGEST] * 16]
    for session in others:
        method.observe(session, 9)
    assert not results
    method.forget("mine")
    assert [result.is_kept for result in results] == [False]
    assert (results[0].newest.count, results[0].previous.count) == (0, 0)
    assert drafts(method, [opened(method, "mine"), *mine]) == [LONGEST, *([NEAREST] * 3 + [LONGEST]) * 2]


def test_each_salts_version_is_judged_by_its_own_sessions() -> None:
    method, kept = VersionedMethod(of_longest()), dict[str, bool]()
    for salt in ("good", "bad"):
        method.try_out(of_nearest(), lambda result, salt=salt: kept.update({salt: result.is_kept}), salt)  # type: ignore[misc]
    for number in range(300):
        for salt in ("good", "bad"):
            session = opened(method, salt)
            is_newest = drafts(method, [session]) == [NEAREST]
            method.observe(session, (2 if is_newest == (salt == "good") else 0) + number % 3)
            method.close(session)
    assert kept == {"good": True, "bad": False}
    assert drafts(method, [opened(method, "good"), opened(method, "bad"), opened(method)]) == [
        NEAREST,
        LONGEST,
        LONGEST,
    ]
    assert method.info.version == 1


def test_a_failing_version_of_a_salt_ends_no_other_trial() -> None:
    method, results = VersionedMethod(of_longest()), list[TrialResult]()
    method.try_out(Failing(prompt_lookup_min=1, prompt_lookup_max=1), results.append, "broken")
    method.try_out(of_nearest(), lambda _: pytest.fail("it did not fail"), "sound")
    with pytest.raises(RuntimeError, match="wrong shape"):
        drafts(method, [opened(method, "sound"), opened(method, "broken")])
    assert [result.is_kept for result in results] == [False]
    assert drafts(method, [opened(method, "broken")]) == [LONGEST]
