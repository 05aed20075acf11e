"""The block rule emits the target's law to 1e-9 whatever the draft's laws are, and accepts as many tokens as the paper
says. Every draft of three tokens is enumerated, and every way the random numbers can fall."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray

from outrider.engine.sampling.laws import draw, probabilities
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance import block, standard
from outrider.verifier_service.acceptance.outcome import Acceptance, LawAt
from outrider.verifier_service.acceptance.standard import dense_law
from tests.verifier_service.acceptance.enumeration import (
    Rule,
    chains,
    distance,
    enumerate_rule,
    equal_toy,
    target_law,
)
from tests.verifier_service.acceptance.toy import Toy, make_toy

GAMMA = 3
KINDS = ("near", "far", "reversed", "disjoint", "certain", "holes", "equal")
EXACT = 1e-9
# A mutant that is off by less than this would be no mutant.
WRONG = 1e-3


def a_toy(kind: str, vocab_size: int, seed: int = 1) -> Toy:
    return equal_toy(seed, vocab_size) if kind == "equal" else make_toy(kind, seed, vocab_size, length=1)


def law_error(rule: Rule, toy: Toy) -> float:
    """Total variation between the first four tokens with the rule and without."""
    found = enumerate_rule(rule, toy, chains(toy, GAMMA))
    return distance(found.completed(toy, GAMMA + 1), target_law(toy, GAMMA + 1))


@pytest.mark.parametrize("vocab_size", [3, 4])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [block.accept, standard.accept], ids=["block", "standard"])
def test_the_law_is_the_targets(rule: Rule, kind: str, vocab_size: int) -> None:
    assert law_error(rule, a_toy(kind, vocab_size)) < EXACT


def test_the_law_is_the_targets_over_eight_tokens() -> None:
    toy = make_toy("far", 2, vocab_size=8, length=1)
    found = enumerate_rule(block.accept, toy, chains(toy, 2))
    assert distance(found.completed(toy, 3), target_law(toy, 3)) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_at_least_i_tokens_are_accepted_as_often_as_the_paper_says(kind: str) -> None:
    """Sun et al. 2024: P(tau >= i | x_1..x_i) = P_i, so P(tau >= i) is the mean of P_i over drafts."""
    toy = a_toy(kind, 3)
    found = enumerate_rule(block.accept, toy, chains(toy, GAMMA))
    for length in range(1, GAMMA + 1):
        expected = 0.0
        for tokens in itertools.product(range(3), repeat=length):
            weight, joint = 1.0, 1.0
            for place, token in enumerate(tokens):
                draft_prob = float(dense_law(toy.sparse[tokens[:place]], 3)[token])
                weight *= draft_prob
                joint = min(1.0, joint * float(toy.target[tokens[:place]][token]) / draft_prob) if draft_prob else 0.0
            expected += weight * joint
        assert found.reached[length] == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("kind", KINDS)
def test_never_fewer_than_standard(kind: str, seed: int) -> None:
    toy = a_toy(kind, 3, seed)
    ours = enumerate_rule(block.accept, toy, chains(toy, GAMMA)).mean_accepted
    theirs = enumerate_rule(standard.accept, toy, chains(toy, GAMMA)).mean_accepted
    assert ours >= theirs - EXACT
    if kind in ("near", "far"):
        assert ours > theirs + 0.005


# ---- mutants ----


def _stop_at_first_failure(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    """The block's thresholds, decided one after another as in `standard`."""
    joint, tau = 1.0, 0
    residual: NDArray[np.float64] | None = None
    count = len(proposal.token_ids)
    for place in range(count + 1):
        target_probs = probabilities(law_at(place - 1))
        excess, threshold = target_probs, joint
        if place < count:
            draft_probs = dense_law(proposal.laws[place], len(target_probs))
            excess = np.maximum(joint * target_probs - draft_probs, 0.0)
            mass = float(excess.sum())
            threshold = 1.0 if mass + 1.0 - joint <= 0.0 else mass / (mass + 1.0 - joint)
        if not rng.random() <= threshold:
            break
        tau, residual = place, excess if excess.any() else target_probs
        if place < count:
            token = proposal.token_ids[place]
            joint = min(1.0, joint * float(target_probs[token]) / float(draft_probs[token]))
    assert residual is not None
    return Acceptance(tuple(range(tau)), draw(residual, rng))


def _residual_of_standard(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    """Block's length, but the next token from norm(max(target - draft, 0)) without the joint ratio."""
    accepted = block.accept(law_at, proposal, rng=rng).accepted_nodes
    target_probs = probabilities(law_at(len(accepted) - 1))
    if len(accepted) == len(proposal.token_ids):
        return Acceptance(accepted, draw(target_probs, rng))
    residual = np.maximum(target_probs - dense_law(proposal.laws[len(accepted)], len(target_probs)), 0.0)
    return Acceptance(accepted, draw(residual if residual.any() else target_probs, rng))


@pytest.mark.parametrize("mutant", [_stop_at_first_failure, _residual_of_standard])
def test_mutants_are_caught(mutant: Rule) -> None:
    assert law_error(mutant, make_toy("far", 1, 3, length=1)) > WRONG


# ---- what a block may never do ----


def test_rows_after_an_impossible_token_are_not_asked_for() -> None:
    """After a token that the target excludes no row can matter, and a grammar has no law to give there."""
    toy = make_toy("near", 3, 3, length=1)
    asked: list[int] = []

    def law_at(node: int) -> NDArray[np.float64]:
        asked.append(node)
        log_weights = toy.law_after((0, 1, 2)[: node + 1]).copy()
        if node == 0:
            log_weights[1] = -np.inf
        return log_weights

    laws = tuple(toy.sparse[(0, 1, 2)[:place]] for place in range(GAMMA))
    for seed in range(50):
        outcome = block.accept(law_at, Proposal(0, (0, 1, 2), "toy", laws=laws), rng=np.random.default_rng(seed))
        assert len(outcome.accepted_nodes) <= 1
    assert set(asked) == {-1, 0}


class _Zeros:
    """The smallest number that a generator can give, always."""

    def random(self) -> float:
        return 0.0


def test_an_impossible_token_is_not_accepted_at_the_end_of_the_unit_interval() -> None:
    toy = make_toy("disjoint", 1, 4, length=1)
    tokens = tuple(toy.sparse[()].token_ids[:1])
    proposal = Proposal(0, tokens, "toy", laws=(toy.sparse[()],))
    outcome = block.accept(lambda _node: toy.law_after(()), proposal, rng=_Zeros())  # type: ignore[arg-type]
    assert outcome.accepted_nodes == ()
    assert toy.target[()][outcome.final_token] > 0.0
