"""How proposals grow: well-formed, the best nodes in ranked modes, and fair to the tree rule in rejection mode."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from outrider.drafting.growth.draft import BEAM_WIDTH, ROOT, Draft
from outrider.drafting.growth.laws import draw_distinct
from outrider.drafting.growth.sampled_tree import ACCEPTED_SHARES, sampled_shape
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.coupling import coupled_ranking
from outrider.engine.sampling.laws import LogitsProcessor, Row
from outrider.shared import wire
from outrider.shared.messages import LAW_TOTAL, DraftStep, Proposal, SessionSpec, SparseLaw
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.acceptance import tree
from outrider.verifier_service.acceptance.outcome import ROOT as TARGET_ROOT
from tests.verifier_service.acceptance.toy import SMALLEST_P_VALUE, chi_square_p_value

VOCAB_SIZE = 5
Net = Callable[[Sequence[int]], Row]
GREEDY = SamplingParams(temperature=0.0)


def random_net(seed: int, scale: float = 1.5) -> Net:
    """Fixed logits for every path."""
    known: dict[tuple[int, ...], Row] = {}

    def logits(path: Sequence[int]) -> Row:
        if tuple(path) not in known:
            rng = np.random.default_rng([seed, len(path), *path])
            known[tuple(path)] = (scale * rng.standard_normal(VOCAB_SIZE)).astype(np.float32)
        return known[tuple(path)]

    return logits


def new_session(params: SamplingParams, mode: SpeculationMode, stream_key: int = 7) -> DraftSession:
    spec = SessionSpec("s", 1, (1, 2), (3,), params, mode, stream_key)
    session = DraftSession(spec, [1, 2, 3], lambda _reply: None)
    session.report(DraftStep(1, 1, (), 4))
    return session


def grow(session: DraftSession, net: Net, **shape: int) -> Draft:
    draft = Draft(session, LogitsProcessor(session.spec.sampling_params, (1, 2), ()), **shape)
    while draft.frontier:
        draft.grow([net(draft.path(place)) for place in draft.frontier])
    return draft


def through_wire(proposal: Proposal) -> Proposal:
    return wire.proposal_from_wire(wire.proposal_to_wire(proposal))


MODES = {
    "greedy": (GREEDY, SpeculationMode.EXACT),
    "greedy with penalties": (SamplingParams(temperature=0.0, frequency_penalty=0.7), SpeculationMode.EXACT),
    "exact": (SamplingParams(temperature=1.0, seed=1), SpeculationMode.EXACT),
    "rejection": (SamplingParams(temperature=1.0, top_p=0.95), SpeculationMode.REJECTION),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("max_nodes", "max_depth", "max_branches"), [(1, 1, 4), (6, 3, 2), (12, 5, 4), (3, 8, 1)])
def test_proposals_are_well_formed(mode: str, max_nodes: int, max_depth: int, max_branches: int) -> None:
    for seed in range(20):
        session = new_session(*MODES[mode], stream_key=seed)
        shape = {"max_nodes": max_nodes, "max_depth": max_depth, "max_branches": max_branches}
        draft = grow(session, random_net(seed), **shape)
        proposal = draft.finish("toy")
        # The wire's own checks: parents first, laws of siblings equal, siblings different, counts sum.
        assert through_wire(proposal) == proposal
        assert 0 < len(proposal.token_ids) <= max_nodes
        assert max(node.depth for node in draft.nodes) <= max_depth
        assert bool(proposal.parents) == (max_branches > 1)
        assert bool(proposal.laws) == (mode == "rejection")
        siblings = Counter(proposal.parents)
        assert not siblings or max(siblings.values()) <= max(max_branches, 1)
        assert len(set(zip(proposal.parents, proposal.token_ids, strict=False))) == len(proposal.parents)
        if max_branches == 1:
            assert len(proposal.token_ids) == min(max_nodes, max_depth)


def all_paths(net: Net, depth: int) -> dict[tuple[int, ...], float]:
    """Joint probability of every path, by plain multiplication."""
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(1, depth + 1):
        for path in itertools.product(range(VOCAB_SIZE), repeat=length):
            logits = net(path[:-1]).astype(np.float64)
            probs = np.exp(logits) / np.exp(logits).sum()
            joint[path] = joint[path[:-1]] * float(probs[path[-1]])
    del joint[()]
    return joint


@pytest.mark.parametrize("max_branches", [1, 3])
@pytest.mark.parametrize(
    ("params", "mode"),
    [
        (GREEDY, SpeculationMode.EXACT),
        (SamplingParams(seed=1), SpeculationMode.EXACT),
        (SamplingParams(), SpeculationMode.REJECTION),
        (SamplingParams(top_p=0.9), SpeculationMode.REJECTION),
    ],
    ids=str,
)
def test_nothing_grows_below_a_row_without_a_number(
    params: SamplingParams, mode: SpeculationMode, max_branches: int
) -> None:
    """A broken forward of one session is no error of those that are drafted for with it."""
    net, broken = random_net(5), np.full(VOCAB_SIZE, np.nan, dtype=np.float32)
    draft = grow(
        new_session(params, mode),
        lambda path: broken if len(path) == 1 else net(path),
        max_nodes=6,
        max_depth=3,
        max_branches=max_branches,
    )
    proposal = draft.finish("x")
    assert 1 <= len(proposal.token_ids) <= max_branches
    assert {node.depth for node in draft.nodes} == {1}
    assert through_wire(proposal) == proposal


@pytest.mark.parametrize("max_nodes", [3, 6, 9])
def test_a_ranked_tree_holds_the_likeliest_paths(max_nodes: int) -> None:
    """Where neither the beam nor the branches cut anything off, against all paths there are."""
    assert max_nodes <= 2 * BEAM_WIDTH
    num_compared = 0
    for seed in range(40):
        net = random_net(seed, scale=2.5)
        draft = grow(new_session(*MODES["greedy"]), net, max_nodes=max_nodes, max_depth=3, max_branches=VOCAB_SIZE)
        proposal = draft.finish("toy")
        paths = {tuple(draft.path(place)) for place in draft._kept()}
        joint = all_paths(net, 3)
        best = sorted(joint, key=lambda path: -joint[path])[:max_nodes]
        widest = max(Counter(len(path) for path in best).values())
        if widest <= BEAM_WIDTH:
            assert paths == set(best), seed
            num_compared += 1
        assert len(proposal.token_ids) == max_nodes
    assert num_compared > 20


def test_exact_mode_tries_the_winners_of_the_race_in_order() -> None:
    session = new_session(*MODES["exact"])
    net = random_net(3)
    draft = grow(session, net, max_nodes=3, max_depth=1, max_branches=3)
    weights = net(()).astype(np.float64)
    expected = coupled_ranking(weights - weights.max(), session.spec.stream_key, 1, 3)
    assert [node.token_id for node in draft.nodes] == expected.tolist()
    confidences = [node.confidence for node in draft.nodes]
    assert confidences == sorted(confidences, reverse=True)
    assert sum(confidences) < 1.0


def reach(ranks: tuple[int, ...]) -> float:
    return math.prod(ACCEPTED_SHARES[rank] for rank in ranks)


@pytest.mark.parametrize("max_nodes", [1, 2, 5, 16, 64])
def test_a_drawn_tree_has_the_nodes_most_likely_to_be_reached(max_nodes: int) -> None:
    """Against all nodes that there could be."""
    depth, branches = 7, 3
    shape = sampled_shape(max_nodes, depth, branches, beam_width=10**6)
    nodes = {(*place, rank) for place, count in shape.items() for rank in range(count)}
    assert len(nodes) == max_nodes
    every = [ranks for length in range(1, depth + 1) for ranks in itertools.product(range(branches), repeat=length)]
    best = sorted(map(reach, every), reverse=True)[:max_nodes]
    assert sorted(map(reach, nodes), reverse=True) == pytest.approx(best)
    narrow = sampled_shape(max_nodes, depth, branches, beam_width=2)
    assert max(Counter(map(len, narrow)).values()) <= 2
    assert sum(narrow.values()) <= max_nodes


def first_tokens(net_target: Net, net_draft: Net, seed: int, prune: bool) -> tuple[int, int]:
    """Two output tokens of rejection mode with a tree: what it emits, then plain draws from the target."""
    session = new_session(*MODES["rejection"], stream_key=seed)
    draft = grow(session, net_draft, max_nodes=5, max_depth=2, max_branches=3)
    if prune:  # the mutant: of what was drawn the surest node is kept
        draft.max_nodes = 1
    proposal = through_wire(draft.finish("toy"))
    processor = LogitsProcessor(session.spec.sampling_params, (1, 2), ())
    parents = proposal.parents

    def path_to(node: int) -> list[int]:
        tokens: list[int] = []
        while node != TARGET_ROOT:
            tokens.insert(0, proposal.token_ids[node])
            node = parents[node]
        return tokens

    rng = np.random.default_rng([seed, 99])
    outcome = tree.accept(
        lambda node: processor.log_weights(net_target(path_to(node)), [3, *path_to(node)]), proposal, rng=rng
    )
    tokens = [proposal.token_ids[node] for node in outcome.accepted_nodes] + [outcome.final_token]
    if len(tokens) < 2:
        weights = np.exp(processor.log_weights(net_target(tokens), [3, *tokens]))
        tokens.append(int(rng.choice(VOCAB_SIZE, p=weights / weights.sum())))
    return tokens[0], tokens[1]


def law_of_two(net: Net) -> np.ndarray:
    processor = LogitsProcessor(MODES["rejection"][0], (1, 2), ())
    law = np.zeros((VOCAB_SIZE, VOCAB_SIZE))
    first = np.exp(processor.log_weights(net(()), [3]))
    for token in range(VOCAB_SIZE):
        second = np.exp(processor.log_weights(net([token]), [3, token]))
        law[token] = first[token] / first.sum() * second / second.sum()
    return law.ravel()


@pytest.mark.parametrize(("prune", "holds"), [(False, True), pytest.param(True, False, marks=pytest.mark.storm)])
def test_sampled_trees_keep_the_targets_law(prune: bool, holds: bool) -> None:
    """20,000 proposals as the drafter makes them, judged as the verifier judges them; pruning them must show."""
    target, draft = random_net(11, 1.0), random_net(12, 1.0)
    counts = Counter(first_tokens(target, draft, seed, prune) for seed in range(20_000))
    observed = np.array([counts[pair] for pair in itertools.product(range(VOCAB_SIZE), repeat=2)])
    p_value = chi_square_p_value(observed, law_of_two(target))
    assert (p_value > SMALLEST_P_VALUE) == holds, p_value


def test_draws_without_replacement_follow_the_law_that_is_left() -> None:
    law = SparseLaw((4, 1, 3), (40_000, 20_000, LAW_TOTAL - 60_000))
    rng = np.random.default_rng(5)
    drawn = Counter(tuple(draw_distinct(law, 2, rng)) for _ in range(50_000))
    probs = np.array(law.counts) / LAW_TOTAL
    pairs = [(a, b) for a, b in itertools.permutations(range(3), 2)]
    expected = np.array([probs[a] * probs[b] / (1 - probs[a]) for a, b in pairs])
    observed = np.array([drawn[law.token_ids[a], law.token_ids[b]] for a, b in pairs])
    assert math.isclose(expected.sum(), 1.0)
    assert chi_square_p_value(observed, expected) > SMALLEST_P_VALUE
    assert len(draw_distinct(law, 9, rng)) == 3
    assert ROOT == TARGET_ROOT
