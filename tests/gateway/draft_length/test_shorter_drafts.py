"""What shorter drafts would have brought, against decoding the same text with them."""

from __future__ import annotations

import random

import pytest

from outrider.gateway.draft_length.draft_costs import MethodCosts
from outrider.gateway.draft_length.draft_policy import RoundOutcome
from outrider.gateway.draft_length.shorter_drafts import num_shorter_rounds

NUM_TOKENS = 60_000


def text_with_runs(seed: int = 0) -> list[bool | None]:
    """Per token whether a draft of it is accepted; None: nothing is found there to begin with. Copies, and what lies
    between them."""
    rng, tokens = random.Random(seed), []
    while len(tokens) < NUM_TOKENS:
        if rng.random() < 0.4:
            tokens += [rng.random() < 0.97 for _ in range(rng.randint(3, 30))]
        else:
            tokens += [None if rng.random() < 0.55 else rng.random() < 0.3 for _ in range(rng.randint(3, 12))]
    return tokens


def rounds_of(tokens: list[bool | None], num_draft_tokens: int) -> list[tuple[int, int]]:
    """Tokens proposed and accepted, round by round."""
    rounds, place = [], 0
    while place + num_draft_tokens < len(tokens):
        draft = tokens[place : place + num_draft_tokens] if tokens[place] is not None else []
        accepted = next((index for index, is_hit in enumerate(draft) if not is_hit), len(draft))
        rounds.append((len(draft), accepted))
        place += accepted + 1
    return rounds


def survival_in(rounds: list[tuple[int, int]], num_draft_tokens: int) -> list[float]:
    return [sum(accepted >= place for _, accepted in rounds) / len(rounds) for place in range(1, num_draft_tokens + 1)]


def learn(costs: MethodCosts, rounds: list[tuple[int, int]], num_draft_tokens: int) -> None:
    """Rounds of outputs that end behind every tenth of them."""
    for index, (proposed, accepted) in enumerate(rounds):
        if index % 10 == 9:
            costs.observe(RoundOutcome(0, 0, 0, 1, (), 100.0, 0.0, 0.0, num_beyond_end=num_draft_tokens))
        outcome = RoundOutcome(
            num_draft_tokens, proposed, accepted, 1, (), 100.0, 0.01, 0.0, draft_depth=num_draft_tokens
        )
        costs.observe(outcome)


@pytest.mark.parametrize("longest", [2, 3, 5, 8])
@pytest.mark.parametrize("acceptance", [0.2, 0.7, 0.95])
def test_tokens_that_are_all_alike_bring_what_they_bring_at_the_beginning_of_a_longer_draft(
    acceptance: float, longest: int
) -> None:
    survival = [acceptance**place for place in range(1, longest + 1)]
    for length in range(1, longest + 1):
        tokens = (1.0 + sum(survival)) / num_shorter_rounds(survival, length, acceptance)
        assert tokens == pytest.approx(1.0 + sum(survival[:length]))


def test_where_the_place_decides_a_shorter_draft_is_the_beginning_of_a_longer_one() -> None:
    survival = [0.9, 0.9 * 0.5, 0.9 * 0.5 * 0.2]
    assert (1.0 + sum(survival)) / num_shorter_rounds(survival, 1, 0.6) == pytest.approx(1.9)
    assert num_shorter_rounds(survival, 3, 0.6) == 1.0


@pytest.mark.parametrize("longest", [2, 3, 5, 8])
def test_where_the_text_decides_shorter_drafts_bring_what_decoding_with_them_does(longest: int) -> None:
    tokens = text_with_runs()
    rounds = rounds_of(tokens, longest)
    survival = survival_in(rounds, longest)
    acceptance = sum(a for _, a in rounds) / sum(min(proposed, a + 1) for proposed, a in rounds)
    for length in range(1, longest):
        truth = NUM_TOKENS / len(rounds_of(tokens, length))
        foretold = (1.0 + sum(survival)) / num_shorter_rounds(survival, length, acceptance)
        assert foretold == pytest.approx(truth, rel=0.04)
    if longest >= 5:
        beginning = 1.0 + survival[0]
        assert beginning < 0.9 * NUM_TOKENS / len(rounds_of(tokens, 1)), "which is far too little"


def test_what_costs_have_learned_from_long_drafts_holds_for_short_ones() -> None:
    """Tokens of a round, and how many are proposed for it."""
    tokens, costs = text_with_runs(), MethodCosts()
    foretold: dict[int, list[tuple[float, float]]] = {1: [], 2: [], 3: []}
    rounds = rounds_of(tokens, 5)
    for start in range(0, len(rounds), 50):
        learn(costs, rounds[start : start + 50], 5)
        for length, found in foretold.items():
            found.append(costs.round_yield(costs.acceptance, length))
    for length, found in foretold.items():
        shorter = rounds_of(tokens, length)
        brought, proposed = (sum(values) / len(found) for values in zip(*found, strict=True))
        assert brought == pytest.approx(NUM_TOKENS / len(shorter), rel=0.05)
        assert proposed == pytest.approx(sum(count for count, _ in shorter) / len(shorter), rel=0.07)


def test_drafting_less_does_not_make_more_look_better() -> None:
    """Otherwise the two lengths would be drafted in turn."""
    costs = MethodCosts()
    learn(costs, rounds_of(text_with_runs(), 5), 5)
    ratios = []
    rounds = rounds_of(text_with_runs(seed=1), 1)[:1_500]
    for start in range(0, len(rounds), 50):
        learn(costs, rounds[start : start + 50], 1)
        longer, shorter = (costs.round_yield(costs.acceptance, length)[0] for length in (5, 1))
        ratios.append(longer / shorter)
    truth = len(rounds_of(text_with_runs(), 1)) / len(rounds_of(text_with_runs(), 5))
    assert sum(ratios) / len(ratios) == pytest.approx(truth, rel=0.1)
