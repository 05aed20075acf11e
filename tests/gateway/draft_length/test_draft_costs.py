"""What a draft brings and costs in tokens, by its definition."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from outrider.gateway.draft_length.draft_costs import MethodCosts
from outrider.gateway.draft_length.draft_policy import LateAnswer, RoundOutcome
from outrider.gateway.draft_length.local_draft_time import LocalDraftTime
from outrider.gateway.draft_length.verifier_load import VerifierLoad
from outrider.shared.draft_policy.draft_prices import PRICED_DRAFTS


def rows(row_s: float, num_sessions: int) -> tuple[float, ...]:
    """What drafts add to a forward where each row costs as much."""
    return tuple(num_draft_tokens * num_sessions * row_s for num_draft_tokens in PRICED_DRAFTS)


def test_the_gain_is_its_definition() -> None:
    """100 tokens/s of 4 sessions; a row costs 0.1 token, a position 2 ms of a session's 25 tokens/s."""
    load = VerifierLoad(100.0, rows(0.001, 4), 4.0)
    costs = MethodCosts(0.002, 0.01, proposed=0.8)
    accepted = 0.5 + 0.25 + 0.125 - 3 * 0.1
    assert costs.gain(load, 0.5, 3) == pytest.approx(0.8 * accepted - 25.0 * (3 * 0.002 + 0.01))
    without = costs.gain(load, 0.5, 3, with_round_trip=False)
    assert without == pytest.approx(0.8 * accepted - 25.0 * 3 * 0.002)
    assert MethodCosts().gain(VerifierLoad(), 0.5, 2) == pytest.approx(0.75)
    together = replace(costs, local_time=LocalDraftTime())
    assert together.gain(load, 0.5, 3) == costs.gain(load, 0.5, 3), "the first that drafts pays for the depth"
    assert together.gain(load, 0.5, 3, with_round_trip=False) == pytest.approx(0.8 * accepted), "one more does not"


def test_a_longer_draft_gains_less_by_what_its_rows_cost() -> None:
    dear_third = tuple(0.001 if length < 2.5 else 0.006 for length in PRICED_DRAFTS)
    load = VerifierLoad(100.0, dear_third, 4.0)
    costs = MethodCosts()
    assert costs.gain(load, 0.5, 2) - costs.gain(load, 0.5, 3) == pytest.approx(25.0 * 0.005 - 0.125)


def test_tokens_that_are_accepted_less_often_further_on_make_shorter_drafts() -> None:
    load = VerifierLoad(640.0, rows(0.0001, 16), 16.0)
    alike, falling = MethodCosts(0.001, 0.006), MethodCosts(0.001, 0.006)
    rng = random.Random(0)
    for costs, chances in ((alike, (0.7, 0.7, 0.7, 0.7)), (falling, (0.85, 0.7, 0.5, 0.3))):
        for _ in range(600):
            num_accepted = next((place for place, chance in enumerate(chances) if rng.random() >= chance), 4)
            costs.observe(replace(round_of(1, num_accepted), draft_s=0.01))
        costs.position_s, costs.overhead_s = 0.001, 0.006
    assert falling.acceptance > 0.9 * alike.acceptance, "the mean hardly tells them apart"
    assert (alike.settled_gain(load, 4)[1], falling.settled_gain(load, 4)[1]) == (4, 3)


@pytest.mark.parametrize("draft_depth", [0, 4])
def test_what_a_first_answer_took_to_catch_up_is_forgotten_at_the_next(draft_depth: int) -> None:
    """The reading of a prompt made a head seem twice as dear for the next twenty rounds."""
    catching_up = replace(round_of(1, 2), num_asked=4, draft_depth=draft_depth, draft_s=0.02, is_catch_up=True)
    usual = replace(catching_up, draft_s=0.008, overhead_s=0.001, is_catch_up=False)
    late, new = MethodCosts(), MethodCosts()
    late.observe(catching_up)
    assert late.is_known
    late.observe(usual)
    new.observe(usual)
    assert late.expected_s(4) == new.expected_s(4)


@pytest.mark.parametrize("row_s", [0.0, 0.0002, 0.0005, 0.002])
@pytest.mark.parametrize(("first_s", "token_s"), [(0.0, 0.0), (0.006, 0.002), (0.03, 0.001)])
@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.85])
def test_all_sessions_draft_the_fewest_tokens_that_bring_about_the_most_a_second(
    row_s: float, first_s: float, token_s: float, acceptance: float
) -> None:
    """Against the rate by its definition: 16 sessions, whose plain rounds take 25 ms."""
    costs = MethodCosts(token_s, first_s, num_accepted=100 * acceptance, num_reached=100.0)

    def rate(num_draft_tokens: int) -> float:
        tokens = 16 * (1 + sum(acceptance**place for place in range(1, num_draft_tokens + 1)))
        return tokens / (0.025 + 16 * num_draft_tokens * row_s + first_s + num_draft_tokens * token_s)

    gain, length = costs.settled_gain(VerifierLoad(640.0, rows(row_s, 16), 16.0), 8)
    about_the_most = 0.99 * max(map(rate, range(1, 9)))
    assert rate(length) >= about_the_most > max(map(rate, range(1, length)), default=0.0)
    assert (gain > 1e-9) == (rate(length) > 640.0 * (1 + 1e-9))


def test_the_length_stays_until_another_is_clearly_better() -> None:
    load = VerifierLoad(640.0, rows(0.0005, 16), 16.0)
    costs = MethodCosts(0.002, 0.006, num_accepted=80.0, num_reached=100.0)
    _, length = costs.settled_gain(load, 8)
    fresh = []
    for accepted in (76.0, 79.0, 83.0, 86.0, 88.0):
        costs.num_accepted = accepted
        assert costs.settled_gain(load, 8)[1] == length
        fresh.append(replace(costs, settled_length=0).settled_gain(load, 8)[1])
    assert max(fresh) > length, "which another would have taken"
    assert min(fresh) < length, "and one that decides anew"
    assert costs.settled_gain(load, 1)[1] == 1
    assert costs.settled_length == length, "a request that allows fewer settles nothing for the others"
    costs.num_accepted = 30.0
    assert costs.settled_gain(load, 8)[1] < length
    assert costs.settled_gain(load, 0) == (0.0, 0)


@pytest.mark.parametrize("max_tokens", [12, 64])
def test_what_a_draft_brings_at_the_end_of_the_output_is_known(max_tokens: int) -> None:
    """Against the tokens of a round as they were: the shorter the outputs, the less later positions bring."""
    costs, rng, num_tokens, num_rounds = MethodCosts(), random.Random(0), 0, 0
    foretold = []
    for _ in range(1_500):
        left = max_tokens - 1  # the first token comes with the prompt
        while left:
            asked = min(5, left - 1)
            accepted = next((place for place in range(asked) if rng.random() >= 0.85), asked)
            outcome = replace(round_of(16, accepted), num_asked=asked, num_draft_tokens=asked, num_beyond_end=5 - asked)
            costs.observe(replace(outcome, draft_depth=5 if asked else 0))
            left, num_tokens, num_rounds = left - 1 - accepted, num_tokens + 1 + accepted, num_rounds + 1
        foretold.append(1.0 + sum(costs.positions.survival(costs.acceptance, 5)))
    assert fmean(foretold[500:]) == pytest.approx(num_tokens / num_rounds, rel=0.02)
    endless = (1 - 0.85**6) / 0.15
    assert fmean(foretold[500:]) < 0.98 * endless


def test_an_end_where_nothing_was_found_says_nothing() -> None:
    costs = MethodCosts()
    before = costs.acceptance
    costs.observe(replace(round_of(1, 0), num_asked=3, num_draft_tokens=0, num_beyond_end=2))
    assert costs.acceptance == before


def round_of(num_sessions: int, num_accepted: int, draft_s: float = 0.01) -> RoundOutcome:
    return RoundOutcome(4, 4, num_accepted, num_sessions, (), 640.0, draft_s, 0.0, draft_depth=4)


@pytest.mark.parametrize("num_sessions", [1, 16])
def test_a_round_counts_as_one_however_many_sessions_tell_of_it(num_sessions: int) -> None:
    costs = MethodCosts()
    for num_accepted, draft_s, num_rounds in ((4, 0.01, 200), (0, 0.02, 1)):
        for _ in range(num_rounds * num_sessions):
            costs.observe(round_of(num_sessions, num_accepted, draft_s))
    assert 0.97 < costs.acceptance < 0.999
    assert costs.expected_s(4) == pytest.approx(0.0105, rel=0.01)


def test_drafts_of_all_sessions_are_not_rare_because_they_do_not_seem_to_pay() -> None:
    """The sessions go on with what was decided before, and what they show is as much noise as ever."""
    costs, rng, seen = MethodCosts(), random.Random(0), []
    for round_number in range(400):
        if round_number == 200:
            costs.tokens_until_probe = 0
            assert costs.takes_probe(VerifierLoad())
        for _ in range(16):
            costs.observe(round_of(16, num_accepted=int(rng.random() < 0.5)))
        seen.append(costs.acceptance)
    assert max(seen[200:]) - min(seen[200:]) < 0.15, "with half a round of memory it is 0.5"


def test_a_rare_draft_counts_for_the_rounds_since_the_last_one() -> None:
    acceptance = []
    for num_plain_rounds in (0, 5, 1_000):
        costs, plain = MethodCosts(), replace(round_of(1, 0), num_asked=0, num_draft_tokens=0, draft_depth=0)
        for _ in range(200):
            costs.observe(round_of(1, num_accepted=4))
        for _ in range(10):
            for _ in range(num_plain_rounds):
                costs.observe(plain)
            costs.observe(round_of(1, num_accepted=0))
        acceptance.append(costs.acceptance)
    often, seldom, hardly_ever = acceptance
    assert often > seldom > hardly_ever > 0.8, "and none makes more than a sixth forgotten"


def test_a_verifier_that_no_longer_drafts_by_itself_is_noticed() -> None:
    costs = MethodCosts()
    costs.observe(round_of(2, 4))
    assert costs.local_time is not None
    costs.observe(replace(round_of(2, 4), draft_depth=0, overhead_s=0.005))
    assert costs.local_time is None
    assert costs.overhead_s > 0.003


def answer(overhead_s: float, num_accepted: int = 1) -> LateAnswer:
    return LateAnswer("ngram", 2, 2, num_accepted, draft_s=0.0002, overhead_s=overhead_s)


def test_the_first_answer_tells_how_far_away_a_drafter_is() -> None:
    costs = MethodCosts()
    assert costs.expected_s(4) is None
    costs.learn(answer(0.1))
    assert costs.overhead_s == 0.1
    assert costs.expected_s(4) == pytest.approx(0.1 + 4 * 0.0001)


def test_one_slow_answer_is_a_hiccup_and_two_are_the_costs() -> None:
    costs = MethodCosts()
    for _ in range(10):
        costs.learn(answer(0.001))
    costs.learn(answer(0.1))
    assert costs.overhead_s < 0.002
    costs.learn(answer(0.001))
    costs.learn(answer(0.2))
    assert costs.overhead_s < 0.003
    costs.learn(answer(0.1))
    assert costs.overhead_s == 0.1
    costs.learn(answer(0.05))
    assert 0.08 < costs.overhead_s < 0.1, "a nearer drafter shows little by little"
    costs.learn(answer(0.002))
    assert costs.overhead_s == 0.002, "and at once where no chance explains it"


def test_a_late_answer_counts_for_the_acceptance_and_not_as_a_round() -> None:
    costs = MethodCosts()
    before, probe = costs.acceptance, costs.tokens_until_probe
    for _ in range(50):
        costs.learn(answer(0.001, num_accepted=0))
    assert costs.acceptance < 0.5 * before
    assert costs.tokens_until_probe == probe


def test_a_drafter_that_was_slow_at_first_is_not_held_to_that() -> None:
    """It had just started: 360 ms for 5 tokens, and 5 ms from then on."""
    costs = MethodCosts()
    costs.learn(replace(answer(0.002), num_asked=5, num_draft_tokens=5, draft_s=0.36))
    assert costs.position_s == pytest.approx(0.072)
    costs.learn(replace(answer(0.002), draft_s=0.002))
    assert costs.position_s == pytest.approx(0.001)
    costs.learn(replace(answer(0.002), draft_s=0.36))
    assert costs.position_s < 0.0017


def test_rounds_that_may_have_been_asked_ahead_count_by_their_mean() -> None:
    """Every third guess holds, and costs nothing; the way takes 30 ms."""
    costs = MethodCosts()
    costs.learn(answer(0.03))
    for place in range(300):
        costs.learn(answer(0.0 if place % 3 == 0 else 0.03), may_be_ahead=True)
        assert costs.overhead_s > 0.015
    assert costs.overhead_s == pytest.approx(0.02, abs=0.003)
