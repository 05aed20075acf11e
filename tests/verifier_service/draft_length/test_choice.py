"""`auto` against fixed lengths that meet the same requests, in the worlds of benchmarks/simulation."""

from __future__ import annotations

import dataclasses
import itertools

import pytest

from benchmarks.simulation.costs import DEFAULT_PATH, Costs, load_costs
from benchmarks.simulation.worlds.cells import HEAD, LOOKUP, MODEL, cells, model_prices, plain_round_s, reshaped
from benchmarks.simulation.worlds.text import NEVER, Acceptance
from benchmarks.simulation.worlds.world import Method, Server, World, run_world
from outrider.verifier_service.draft_length.choice import PLAIN, Choice, Drafted, DraftLength, RoundSample
from outrider.verifier_service.draft_length.limits import (
    LOOK_ROUNDS,
    LOOK_SESSIONS,
    LOOK_SHARE,
    PLAIN_ROUNDS,
    SETTLE_ROUNDS,
)

PLAIN_S = 0.01


@pytest.fixture(scope="module")
def costs() -> Costs:
    return load_costs(DEFAULT_PATH)


def rates(world: World, lengths: tuple[int, ...] = (0, 1, 3, 5)) -> tuple[float, dict[int, float]]:
    """Of `auto`, and by fixed length."""
    fixed = {length: run_world(world, length)[0].token_rate for length in lengths}
    return run_world(world, None)[0].token_rate, fixed


def make_world(costs: Costs, kind: Acceptance, num_streams: int, *others: Method, factor: float = 1.0) -> World:
    server = Server(costs, model_prices(costs, factor), num_streams, others=others)
    seconds = 600 * plain_round_s(costs, num_streams)
    return World((server,), (kind,), 64, 32, seconds, seconds)


@pytest.mark.parametrize("num_streams", [1, 8])
def test_good_drafts_are_used_at_about_the_best_length(costs: Costs, num_streams: int) -> None:
    auto, fixed = rates(make_world(costs, MODEL, num_streams))
    assert auto > 1.2 * fixed[0]
    assert auto > 0.95 * max(fixed.values())


@pytest.mark.parametrize("num_streams", [1, 8])
def test_drafts_that_are_never_right_cost_next_to_nothing(costs: Costs, num_streams: int) -> None:
    auto, fixed = rates(make_world(costs, NEVER, num_streams, factor=3.0), (0,))
    assert auto > 0.98 * fixed[0]


def test_of_three_methods_the_one_that_pays_is_found(costs: Costs) -> None:
    others = (Method("suffix", LOOKUP, Acceptance((0.2,), proposed=0.3)), Method("eagle3", model_prices(costs), HEAD))
    auto, fixed = rates(make_world(costs, NEVER, 2, *others), (0,))
    _, best = rates(make_world(costs, HEAD, 2), (3,))
    assert auto > 0.93 * best[3] > 1.1 * fixed[0]


def test_the_first_tokens_of_a_stream_whose_drafts_lose_are_not_slower(costs: Costs) -> None:
    [cell] = [cell for cell in cells(costs) if cell.name == "cold-sampled"]
    auto, fixed = rates(cell.world, (0,))
    assert auto > 0.98 * fixed[0]


def test_after_a_turn_for_the_worse_the_next_tokens_are_nearly_as_fast(costs: Costs) -> None:
    [cell] = [cell for cell in cells(costs) if cell.name == "turn-head"]
    auto, fixed = rates(cell.world, (0,))
    assert auto > 0.95 * fixed[0]


def test_good_stretches_are_found_again(costs: Costs) -> None:
    """Drafts that lose in every other stretch of 400 tokens."""
    kind = Acceptance((0.9,), (0.15,), easy_run=400, hard_run=400)
    world = make_world(reshaped(costs, "costly-rows"), kind, 1, factor=2.0)
    world = dataclasses.replace(world, num_tokens=400, seconds=4 * world.seconds)
    auto, fixed = rates(world, (0,))
    assert auto > 1.02 * fixed[0]


class Machine:
    """Rounds of one session: plain ones take PLAIN_S; drafts of each method take draft_s and bring `brings` tokens."""

    def __init__(self, limits: dict[str, int], brings: dict[str, int], draft_s: float) -> None:
        self.limits, self.brings, self.draft_s = limits, brings, draft_s
        self.policy = DraftLength(lambda _sessions, _tokens: 0.0)
        self.choices: list[Choice] = []

    def run(self, num_rounds: int) -> None:
        for _ in range(num_rounds):
            choice = self.policy.decide(self.limits)
            self.choices.append(choice)
            method, length = choice
            drafts, tokens, seconds = [], 1, PLAIN_S
            if method:
                tokens += min(length, self.brings[method])
                seconds += self.draft_s + self.policy.rows_s(1.0, float(length))
                drafts = [Drafted(method, length, length, tokens - 1)]
            self.policy.observe(RoundSample(1, 1, tokens, seconds, drafts, self.draft_s))


def test_a_look_is_paid_for_before_the_next_one() -> None:
    """Rounds with drafts take four times as long and bring nothing."""
    machine = Machine({"draft_model": 4}, {"draft_model": 0}, 3 * PLAIN_S)
    machine.run(12_000)
    drafted = [place for place, choice in enumerate(machine.choices) if choice != PLAIN]
    looks = 1 + sum(after - before > 1 for before, after in itertools.pairwise(drafted))
    assert looks >= 2, "it is tried again"
    assert 3 * (len(drafted) - LOOK_ROUNDS) / len(machine.choices) < 1.5 * LOOK_SHARE


def test_methods_of_which_nothing_is_known_are_looked_at_first_and_the_better_one_is_taken() -> None:
    machine = Machine({"eagle3": 4, "ngram": 4, "suffix": 4}, {"eagle3": 1, "ngram": 0, "suffix": 4}, 0.3 * PLAIN_S)
    machine.run(600)
    first = list(dict.fromkeys(choice.method for choice in machine.choices if choice.method))
    assert first == ["eagle3", "ngram", "suffix"]
    assert machine.choices[-1] == Choice("suffix", 4)
    machine.run(1500)
    assert PLAIN in machine.choices[600:], "plain decoding is looked at too"


def test_nothing_is_drafted_before_plain_decoding_is_known_or_without_methods() -> None:
    machine = Machine({"ngram": 4}, {"ngram": 4}, 0.0)
    machine.run(PLAIN_ROUNDS + SETTLE_ROUNDS + 1)
    assert set(machine.choices[:PLAIN_ROUNDS]) == {PLAIN}
    assert machine.choices[-1].method == "ngram"
    machine.limits = {}
    machine.run(5)
    assert set(machine.choices[-5:]) == {PLAIN}


def test_a_round_with_drafts_stays_within_its_bound() -> None:
    machine = Machine({"draft_model": 8}, {"draft_model": 8}, 0.0)
    machine.policy.rows_s = lambda _sessions, tokens: tokens * 0.1 * PLAIN_S
    machine.policy.max_round_s = 1.35 * PLAIN_S
    machine.run(300)
    assert max(choice.num_draft_tokens for choice in machine.choices) == 3


def test_a_draft_is_waited_for_as_long_as_it_gains() -> None:
    machine = Machine({"draft_model": 4}, {"draft_model": 4}, 0.0)
    assert machine.policy.plain_round_s == 0.0
    machine.run(300)
    assert machine.choices[-1] == Choice("draft_model", 4)
    assert machine.policy.patience_s == pytest.approx(4 * PLAIN_S)


def test_one_round_that_takes_a_hundred_times_as_long_does_not_end_drafting() -> None:
    """As when a graph is captured, or a kernel compiled, at the first draft of a new size."""
    machine = Machine({"head": 4}, {"head": 3}, 0.001)
    machine.run(60)
    assert machine.choices[-1].method == "head"
    machine.policy.decide(machine.limits)
    machine.policy.observe(RoundSample(1, 1, 4, 100 * PLAIN_S, [Drafted("head", 4, 4, 3)], 99 * PLAIN_S))
    machine.run(40)
    assert [choice.method for choice in machine.choices[-40:]].count("head") > 20


def test_requests_without_drafts_between_two_answers_do_not_end_drafting() -> None:
    """They are plain decoding: it needs no look, and what is usual stays so."""
    machine = Machine({"head": 4}, {"head": 3}, 0.001)
    machine.run(300)
    for _ in range(600):
        machine.policy.observe_plain(1, 1, PLAIN_S)
    machine.run(30)
    assert {choice.method for choice in machine.choices[-30:]} == {"head"}


def plain_rounds(policy: DraftLength, num_rounds: int, num_sessions: int, seconds: float = PLAIN_S) -> None:
    for _ in range(num_rounds):
        policy.observe(RoundSample(num_sessions, num_sessions, num_sessions, seconds))


def test_a_look_while_nothing_is_drafted_makes_few_sessions_dearer() -> None:
    """Those that its method has least to read of; once a method is drafted with, all draft."""
    policy, limits, unread = DraftLength(lambda _sessions, _tokens: 0.0), {"head": 4}, [9, 3, 8, 1, 7, 2, 6, 4]
    assert policy.that_draft(range(8), unread.__getitem__) == range(8), "no look"
    for _ in range(PLAIN_ROUNDS + 2 * LOOK_ROUNDS):
        if policy.decide(limits) != PLAIN:
            break
        plain_rounds(policy, 1, len(unread))
    assert sorted(policy.that_draft(range(8), unread.__getitem__)) == [1, 3, 5, 7]
    for _ in range(SETTLE_ROUNDS + LOOK_ROUNDS):
        length = policy.decide(limits).num_draft_tokens
        drafts = [Drafted("head", length, length, length)] * LOOK_SESSIONS
        policy.observe(RoundSample(8, 8, 8 + LOOK_SESSIONS * length, 1.2 * PLAIN_S, drafts, 0.1 * PLAIN_S))
    assert policy.decide(limits).method == "head"
    assert policy.that_draft(range(8), unread.__getitem__) == range(8)


def test_what_can_hardly_gain_is_looked_at_once_that_is_paid_for() -> None:
    """Rows so dear that even a good head would lose: nothing is known of it, and yet its look waits."""
    machine = Machine({"eagle3": 4}, {"eagle3": 4}, 0.0)
    machine.policy.rows_s = lambda _sessions, tokens: 5.0 * tokens * PLAIN_S
    machine.run(200)
    assert set(machine.choices) == {PLAIN}
    machine.run(12_000)
    assert "eagle3" in {choice.method for choice in machine.choices}


def test_drafts_that_users_ask_for_by_name_are_not_charged() -> None:
    policy = DraftLength(lambda _sessions, _tokens: 0.0)
    plain_rounds(policy, PLAIN_ROUNDS + 1, 1)
    credit_s = policy.ledger.credit_s
    for _ in range(50):
        policy.observe(RoundSample(1, 1, 1, 3 * PLAIN_S, [Drafted("head", 4, 4, 0)], is_own=False))
    assert policy.ledger.credit_s == credit_s > 0.0


def test_the_noise_of_plain_rounds_is_no_loss() -> None:
    policy = DraftLength(lambda _sessions, _tokens: 0.0)
    plain_rounds(policy, PLAIN_ROUNDS + 1, 1)
    credit_s = policy.ledger.credit_s
    plain_rounds(policy, 100, 1, 1.5 * PLAIN_S)  # the machine has become slower
    assert policy.ledger.credit_s >= credit_s
