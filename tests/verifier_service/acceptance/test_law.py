"""Every acceptance rule emits exactly the target's law: chi-square over all sequences of the first tokens.

Proposals go through the wire's bytes, draft laws through the drafter's own `sparse_law`. Seeds are fixed. Rules that
look at the whole block or at a tree are enumerated instead (test_block, test_tree).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from types import ModuleType

import numpy as np
import pytest

from outrider.engine.sampling.coupling import coupled_sample
from outrider.shared.messages import LAW_SIZE, LAW_TOTAL, Proposal, SparseLaw
from outrider.verifier_service.acceptance import block, coupled, point_mass, standard
from outrider.verifier_service.acceptance.outcome import Acceptance, LawAt
from tests.verifier_service.acceptance.toy import (
    NUM_DRAFT_TOKENS,
    SMALLEST_P_VALUE,
    Prefix,
    RoundRule,
    Toy,
    chi_square_p_value,
    draw_from_counts,
    make_toy,
    path_to,
    through_wire,
)

# Draws per kind of draft law: 200,000 for the standard rule in all.
STANDARD_DRAWS = {
    "near": 100_000,
    "far": 40_000,
    "reversed": 15_000,
    "disjoint": 15_000,
    "certain": 15_000,
    "holes": 15_000,
}


def law_at(toy: Toy, prefix: Prefix, proposal: Proposal) -> LawAt:
    return lambda node: toy.law_after(prefix + path_to(proposal, node))


def emitted(proposal: Proposal, acceptance: Acceptance) -> list[int]:
    return [*(proposal.token_ids[node] for node in acceptance.accepted_nodes), acceptance.final_token]


def chain_rule(toy: Toy, rule: ModuleType, seed: int) -> RoundRule:
    """Rounds of a chain sampled from the draft's own sparse laws."""
    numpy_rng = np.random.default_rng(seed)

    def emit(prefix: Prefix, rng: random.Random) -> Sequence[int]:
        tokens: list[int] = []
        laws: list[SparseLaw] = []
        for _ in range(NUM_DRAFT_TOKENS):
            laws.append(toy.sparse[(*prefix, *tokens)])
            tokens.append(draw_from_counts(laws[-1], rng))
        proposal = through_wire(Proposal(len(prefix), tuple(tokens), "toy", laws=tuple(laws)))
        return emitted(proposal, rule.accept(law_at(toy, prefix, proposal), proposal, rng=numpy_rng))

    return emit


@pytest.mark.parametrize("kind", sorted(STANDARD_DRAWS))
def test_chains_with_laws(kind: str) -> None:
    toy = make_toy(kind, seed=1)
    assert toy.p_value(chain_rule(toy, standard, seed=2), STANDARD_DRAWS[kind], seed=3) > SMALLEST_P_VALUE


def point_mass_rule(toy: Toy, seed: int, *, is_tree: bool) -> RoundRule:
    """Deterministic drafts: the draft law's argmax, or a tree of its two likeliest tokens at two levels."""
    numpy_rng = np.random.default_rng(seed)

    @cache
    def chain(prefix: Prefix) -> Proposal:
        tokens: list[int] = []
        for _ in range(NUM_DRAFT_TOKENS):
            tokens.append(int(np.argmax(toy.draft[(*prefix, *tokens)])))
        return Proposal(len(prefix), tuple(tokens), "toy")

    @cache
    def binary_tree(prefix: Prefix) -> Proposal:
        tokens = [int(token) for token in np.argsort(-toy.draft[prefix])[:2]]
        parents = [-1, -1]
        for parent in (0, 1):
            for token in np.argsort(-toy.draft[(*prefix, tokens[parent])])[:2]:
                tokens.append(int(token))
                parents.append(parent)
        return Proposal(len(prefix), tuple(tokens), "toy", parents=tuple(parents))

    def emit(prefix: Prefix, rng: random.Random) -> Sequence[int]:
        proposal = through_wire(binary_tree(prefix) if is_tree else chain(prefix))
        return emitted(proposal, point_mass.accept(law_at(toy, prefix, proposal), proposal, rng=numpy_rng))

    return emit


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["near", "reversed", "certain"])
def test_point_mass(kind: str, is_tree: bool) -> None:
    toy = make_toy(kind, seed=4)
    num_draws = 60_000 if kind == "near" else 20_000
    assert toy.p_value(point_mass_rule(toy, 5, is_tree=is_tree), num_draws, seed=6) > SMALLEST_P_VALUE


@pytest.mark.parametrize(("kind", "num_draws"), [("near", 40_000), ("reversed", 8_000), ("holes", 8_000)])
def test_coupled_over_random_keys(kind: str, num_draws: int) -> None:
    """Sequences of one key are fixed; over keys they follow the target's law. Draft and target share the noise."""
    toy = make_toy(kind, seed=10)
    with np.errstate(divide="ignore"):
        draft_log_weights = {prefix: np.log(probs) for prefix, probs in toy.draft.items()}
    counts = np.zeros(toy.vocab_size**toy.length, dtype=np.int64)
    num_accepted = 0
    rng = random.Random(11)
    for _ in range(num_draws):
        key = rng.getrandbits(64)
        sequence: Prefix = ()
        while len(sequence) < toy.length:
            tokens: list[int] = []
            # No further than the end of the sequence: what comes after it is cut anyway.
            for _ in range(min(NUM_DRAFT_TOKENS, toy.length - len(sequence))):
                path = (*sequence, *tokens)
                tokens.append(coupled_sample(draft_log_weights[path], key, len(path)))
            proposal = through_wire(Proposal(len(sequence), tuple(tokens), "toy"))
            acceptance = coupled.accept(law_at(toy, sequence, proposal), proposal, stream_key=key)
            num_accepted += len(acceptance.accepted_nodes)
            sequence += tuple(emitted(proposal, acceptance))
        place = 0
        for token in sequence[: toy.length]:
            place = place * toy.vocab_size + token
        counts[place] += 1
    assert chi_square_p_value(counts, toy.joint()) > SMALLEST_P_VALUE
    assert num_accepted > 0


@pytest.mark.parametrize("excess", [1e-9, 1e-12, 1e-14, 3e-16])
def test_a_target_that_is_all_but_certain(excess: float) -> None:
    """A draft law of whole counts is certain where the target is certain but for 1e-12: nothing may fail there."""
    with np.errstate(divide="ignore"):
        log_weights = np.log(np.array([1.0, excess, 0.0]))
    law = SparseLaw((0,), (LAW_TOTAL,))
    proposal = Proposal(0, (0, 0), "toy", laws=(law, law))
    rng = np.random.default_rng(15)
    for rule in (standard, block):
        for _ in range(2000):
            tokens = emitted(proposal, rule.accept(lambda _node: log_weights, proposal, rng=rng))
            assert 2 not in tokens
            assert tokens == [0, 0, 0] or excess > 1e-10


def test_the_first_place_of_a_block_always_holds() -> None:
    """P_0 = 1 makes h_0 = 1 whatever the rounding: the largest uniform that there is must not refuse it."""

    class Largest:
        def random(self) -> float:
            return float(np.nextafter(1.0, 0.0))

    law = SparseLaw((0,), (LAW_TOTAL,))
    proposal = Proposal(0, (0,), "toy", laws=(law,))
    for excess in np.geomspace(1e-17, 0.9, 2000):
        log_weights = np.log(np.array([1.0, excess]))
        block.accept(lambda _node, row=log_weights: row, proposal, rng=Largest())  # type: ignore[arg-type, misc]


class TestDrawsOfTheDrafter:
    """`draft_model` samples from exactly the counts that it sends."""

    @pytest.mark.parametrize("vocab_size", [3, 16, 100])
    def test_sparse_laws_sum_to_the_total_and_keep_the_likeliest(self, vocab_size: int) -> None:
        from outrider.drafting.growth.laws import sparse_law

        rng = np.random.default_rng(16)
        for _ in range(200):
            probs = rng.dirichlet(np.full(vocab_size, 0.3))
            with np.errstate(divide="ignore"):
                law = sparse_law(np.log(probs))
            assert sum(law.counts) == LAW_TOTAL
            assert min(law.counts) > 0
            assert len(set(law.token_ids)) == len(law.token_ids) <= LAW_SIZE
            left_out = np.delete(probs, law.token_ids)
            assert left_out.size == 0 or left_out.max() <= max(probs[list(law.token_ids)].min(), 1.0 / LAW_TOTAL)
            shares = probs[list(law.token_ids)] / np.sort(probs)[::-1][:LAW_SIZE].sum()
            np.testing.assert_allclose(np.array(law.counts) / LAW_TOTAL, shares, atol=(LAW_SIZE + 1) / LAW_TOTAL)

    def test_draws_follow_the_counts(self) -> None:
        from outrider.drafting.growth.laws import draw_distinct

        law = SparseLaw((7, 2, 9, 4), (40_000, 20_000, 5_000, 536))
        rng = np.random.default_rng(17)
        drawn = np.bincount([draw_distinct(law, 1, rng)[0] for _ in range(100_000)], minlength=10)
        probs = np.zeros(10)
        probs[list(law.token_ids)] = np.array(law.counts) / LAW_TOTAL
        assert chi_square_p_value(drawn, probs) > SMALLEST_P_VALUE

    def test_both_ends_of_the_counts_are_drawn(self) -> None:
        from outrider.drafting.growth.laws import draw_distinct

        class Fixed:
            def __init__(self, value: int) -> None:
                self.value = value

            def integers(self, _high: int) -> int:
                return self.value

        law = SparseLaw((7, 2), (LAW_TOTAL - 1, 1))
        expected = {0: 7, LAW_TOTAL - 2: 7, LAW_TOTAL - 1: 2}
        assert {value: draw_distinct(law, 1, Fixed(value))[0] for value in expected} == expected  # type: ignore[arg-type]
