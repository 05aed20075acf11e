"""The tree rule emits the target's law to 1e-9 for every tree whose children were drawn without replacement.

All trees that the draft laws can give are enumerated, and every way the rule's random numbers can fall.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from outrider.engine.sampling.laws import draw, probabilities
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance import standard, tree
from outrider.verifier_service.acceptance.outcome import ROOT, Acceptance, LawAt, children_of
from outrider.verifier_service.acceptance.standard import dense_law
from tests.verifier_service.acceptance.enumeration import (
    Enumerated,
    Rule,
    chains,
    distance,
    enumerate_rule,
    equal_toy,
    target_law,
    trees,
)
from tests.verifier_service.acceptance.toy import Toy, make_toy

KINDS = ("near", "far", "reversed", "disjoint", "certain", "holes", "equal")
EXACT = 1e-9
WRONG = 1e-3


def a_toy(kind: str, vocab_size: int, seed: int = 1) -> Toy:
    return equal_toy(seed, vocab_size) if kind == "equal" else make_toy(kind, seed, vocab_size, length=1)


def found_for(rule: Rule, toy: Toy, branching: tuple[int, ...]) -> Enumerated:
    return enumerate_rule(rule, toy, trees(toy, branching))


def law_error(rule: Rule, toy: Toy, branching: tuple[int, ...]) -> float:
    """Total variation between the first tokens with the rule and without."""
    length = len(branching) + 1
    return distance(found_for(rule, toy, branching).completed(toy, length), target_law(toy, length))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("branching", [(2, 2), (3, 2), (2, 1, 1), (1, 2, 1)])
def test_the_law_is_the_targets(kind: str, branching: tuple[int, ...]) -> None:
    assert law_error(tree.accept, a_toy(kind, 3), branching) < EXACT


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab_size", "branching"), [(5, (2, 1)), (5, (3,)), (8, (2,)), (8, (3,))])
def test_the_law_is_the_targets_in_larger_vocabularies(kind: str, vocab_size: int, branching: tuple[int, ...]) -> None:
    assert law_error(tree.accept, a_toy(kind, vocab_size, seed=2), branching) < EXACT


@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_without_siblings_is_the_standard_rule(kind: str) -> None:
    toy = a_toy(kind, 3)
    ours = found_for(tree.accept, toy, (1, 1, 1))
    theirs = enumerate_rule(standard.accept, toy, chains(toy, 3))
    assert distance(ours.outputs, theirs.outputs) < EXACT


@pytest.mark.parametrize("kind", ["near", "far", "reversed"])
def test_a_second_child_is_worth_something(kind: str) -> None:
    toy = a_toy(kind, 4)
    means = [found_for(tree.accept, toy, (count,)).mean_accepted for count in (1, 2, 3)]
    assert means[0] + 0.01 < means[1] < means[2] + EXACT


# ---- mutants: transcriptions of the rule with one step missing ----


def _mutant(*, update_target: bool = True, update_draft: bool = True, current: bool = True) -> Rule:
    """`current` False subtracts the draft law that the siblings were drawn from, not what has become of it."""

    def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
        children = children_of(proposal)
        node, accepted = ROOT, list[int]()
        while True:
            target_probs = probabilities(law_at(node))
            siblings = children.get(node, [])
            original = dense_law(proposal.laws[siblings[0]], len(target_probs)) if siblings else target_probs
            draft_probs = original.copy()
            chosen = None
            for child in siblings:
                token = proposal.token_ids[child]
                if rng.random() * draft_probs[token] < target_probs[token]:
                    chosen = child
                    break
                residual = np.maximum(target_probs - (draft_probs if current else original), 0.0)
                if update_target and residual.any():
                    target_probs = residual / residual.sum()
                left = draft_probs.copy()
                left[token] = 0.0
                if update_draft and left.any():
                    draft_probs = left / left.sum()
            if chosen is None:
                return Acceptance(tuple(accepted), draw(target_probs, rng))
            node = chosen
            accepted.append(chosen)

    return accept


def test_the_transcription_without_a_mutation_is_the_rule() -> None:
    toy = make_toy("far", 1, 3, length=1)
    ours, theirs = (found_for(rule, toy, (2, 2)) for rule in (tree.accept, _mutant()))
    assert distance(ours.outputs, theirs.outputs) < EXACT


@pytest.mark.parametrize(
    "mutant",
    [_mutant(update_target=False), _mutant(update_draft=False), _mutant(current=False)],
    ids=["target not updated", "draft not updated", "original draft law"],
)
@pytest.mark.parametrize("branching", [(3,), (2, 2)])
def test_mutants_are_caught(mutant: Rule, branching: tuple[int, ...]) -> None:
    assert law_error(mutant, make_toy("far", 1, 4, length=1), branching) > WRONG


def test_siblings_in_another_order_than_drawn_are_caught() -> None:
    """Sorted by probability, as a beam search would send them, they are no sample without replacement any more."""
    toy = make_toy("far", 1, 4, length=1)

    def sorted_siblings() -> Iterator[tuple[Proposal, float]]:
        for proposal, weight in trees(toy, (2,)):
            order = toy.sparse[()].token_ids
            yield replace(proposal, token_ids=tuple(sorted(proposal.token_ids, key=order.index))), weight

    found = enumerate_rule(tree.accept, toy, sorted_siblings())
    assert distance(found.completed(toy, 2), target_law(toy, 2)) > WRONG
