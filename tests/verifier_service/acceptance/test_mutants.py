"""Wrong rules that have been shipped or are easily written: the statistics must reject every one of them.

Each mutant is the smallest change of a right rule; `test_the_right_rules_pass` runs those through the same harness, so
a rejection is the mutant's fault. What is drawn for one purpose is drawn from one generator, in plain Python.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from outrider.engine.sampling.coupling import coupled_sample
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw
from tests.verifier_service.acceptance.toy import (
    NUM_DRAFT_TOKENS,
    SMALLEST_P_VALUE,
    Prefix,
    Toy,
    draw_plain,
    make_toy,
    through_wire,
)

NUM_DRAWS = 30_000
Law = Sequence[float]
Mutant = Callable[[Toy, Prefix, random.Random], Sequence[int]]


def excess(first: Law, second: Law) -> list[float]:
    """norm(max(first - second, 0)); `first` where nothing is left."""
    left = [max(a - b, 0.0) for a, b in zip(first, second, strict=True)]
    total = sum(left)
    return [value / total for value in left] if total > 0 else list(first)


def uniform(size: int) -> list[float]:
    return [1.0 / size] * size


def likeliest(probs: Law) -> int:
    return max(range(len(probs)), key=lambda token: (probs[token], -token))


def chain(
    toy: Toy,
    prefix: Prefix,
    rng: random.Random,
    *,
    sampled: Callable[[Law], Law] = lambda draft: draft,
    sent: Callable[[Law], Law] = lambda draft: draft,
    residual: Callable[[Law, Law], Law] = excess,
    is_dropped: Callable[[Law, int], bool] = lambda _draft, _token: False,
) -> list[int]:
    """Standard speculative sampling (Leviathan et al. 2023) with replaceable parts."""
    tokens: list[int] = []
    while len(tokens) < NUM_DRAFT_TOKENS:
        draft = toy.draft[(*prefix, *tokens)].tolist()
        token = draw_plain(sampled(draft), rng)
        if is_dropped(draft, token):
            break
        tokens.append(token)
    for place, token in enumerate(tokens):
        path = (*prefix, *tokens[:place])
        target, draft = toy.target[path].tolist(), sent(toy.draft[path].tolist())
        if rng.random() * draft[token] >= target[token]:
            return [*tokens[:place], draw_plain(residual(target, draft), rng)]
    return [*tokens, draw_plain(toy.target[(*prefix, *tokens)].tolist(), rng)]


def top_two(draft: Law) -> list[float]:
    border = sorted(draft)[-2]
    kept = [prob if prob >= border else 0.0 for prob in draft]
    return [prob / sum(kept) for prob in kept]


def right_chain(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    return chain(toy, prefix, rng)


def right_truncated_chain(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    return chain(toy, prefix, rng, sampled=top_two, sent=top_two)


def right_random_draft(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """A cache miss answered with random tokens is fine when the law that is sent says so."""
    return chain(toy, prefix, rng, sampled=lambda draft: uniform(len(draft)), sent=lambda draft: uniform(len(draft)))


def right_stop_rule(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """A stop rule may look at the law: here it stops where the draft is unsure, before it draws."""
    return chain(toy, prefix, rng, is_dropped=lambda draft, _token: max(draft) < 0.5)


def truncated_law_sent_but_full_law_sampled(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    return chain(toy, prefix, rng, sent=top_two)


def beam_draft_treated_as_a_sample(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    def one_hot(draft: Law) -> Law:
        best = likeliest(draft)
        return [float(token == best) for token in range(len(draft))]

    return chain(toy, prefix, rng, sampled=one_hot)


def draft_token_dropped_for_its_own_low_probability(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    return chain(toy, prefix, rng, is_dropped=lambda draft, token: draft[token] < 0.3)


def residual_from_the_wrong_side(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    return chain(toy, prefix, rng, residual=lambda target, draft: excess(draft, target))


def residual_renormalized_twice(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """The residual is made a law, and then the draft law is taken off it once more."""
    return chain(toy, prefix, rng, residual=lambda target, draft: excess(excess(target, draft), draft))


def residual_is_the_target(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    return chain(toy, prefix, rng, residual=lambda target, _draft: target)


def random_tokens_on_a_miss_verified_by_match(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """The draft token is random; it stands if the target happens to draw it, else the residual of the draft's law
    is drawn, as if the token had come from there."""
    emitted: list[int] = []
    for _ in range(NUM_DRAFT_TOKENS):
        path = (*prefix, *emitted)
        target, draft = toy.target[path].tolist(), toy.draft[path].tolist()
        token = rng.randrange(len(draft))
        if draw_plain(target, rng) != token:
            return [*emitted, draw_plain(excess(target, draft), rng)]
        emitted.append(token)
    return [*emitted, draw_plain(toy.target[(*prefix, *emitted)].tolist(), rng)]


def coupled_noise_reused_for_the_residual(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """The draft is sampled with shared noise, verified by the ratio, and the residual is sampled with that noise."""
    key = rng.getrandbits(64)
    tokens: list[int] = []
    for _ in range(NUM_DRAFT_TOKENS):
        path = (*prefix, *tokens)
        tokens.append(coupled_sample(np.log(toy.draft[path]), key, len(path)))
    for place, token in enumerate(tokens):
        path = (*prefix, *tokens[:place])
        target, draft = toy.target[path], toy.draft[path]
        if rng.random() * draft[token] >= target[token]:
            with np.errstate(divide="ignore"):
                rest = np.log(excess(target.tolist(), draft.tolist()))
            return [*tokens[:place], coupled_sample(rest, key, len(path))]
    return [*tokens, draw_plain(toy.target[(*prefix, *tokens)].tolist(), rng)]


def draft_randomness_used_again(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """Every round's draft is drawn with the uniforms of the first: a drafter that starts its generator anew when it
    is opened again. `rng` of a sequence is recognized by the state it had at the sequence's start."""
    if not prefix:
        draft_randomness_used_again.seed = rng.getrandbits(64)  # type: ignore[attr-defined]
    draft_rng = random.Random(draft_randomness_used_again.seed)  # type: ignore[attr-defined]
    path = prefix
    draft = toy.draft[path].tolist()
    token = draw_plain(draft, draft_rng)
    target = toy.target[path].tolist()
    if rng.random() * draft[token] >= target[token]:
        return [draw_plain(excess(target, draft), rng)]
    return [token]


def tree_children(toy: Toy, prefix: Prefix) -> list[int]:
    draft = toy.draft[prefix].tolist()
    return sorted(range(len(draft)), key=lambda token: -draft[token])[:2]


def right_deterministic_tree(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """Children in turn, each against what the earlier ones left of the target's law."""
    emitted: list[int] = []
    for _ in range(2):
        left = toy.target[(*prefix, *emitted)].tolist()
        for token in tree_children(toy, (*prefix, *emitted)):
            if rng.random() * sum(left) < left[token]:
                emitted.append(token)
                break
            left[token] = 0.0
        else:
            return [*emitted, draw_plain(left, rng)]
    return emitted


def independent_accept_per_node_of_a_deterministic_tree(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    emitted: list[int] = []
    for _ in range(2):
        target = toy.target[(*prefix, *emitted)].tolist()
        children = tree_children(toy, (*prefix, *emitted))
        accepted = next((token for token in children if rng.random() < target[token]), None)
        if accepted is None:
            rest = [0.0 if token in children else prob for token, prob in enumerate(target)]
            return [*emitted, draw_plain(rest, rng)]
        emitted.append(accepted)
    return emitted


def independent_accept_per_node_of_a_sampled_tree(toy: Toy, prefix: Prefix, rng: random.Random) -> list[int]:
    """Two children without replacement, both tested against the laws of the node as if each stood alone."""
    emitted: list[int] = []
    for _ in range(2):
        path = (*prefix, *emitted)
        target, draft = toy.target[path].tolist(), toy.draft[path].tolist()
        first = draw_plain(draft, rng)
        second = draw_plain([0.0 if token == first else prob for token, prob in enumerate(draft)], rng)
        accepted = next((z for z in (first, second) if rng.random() * draft[z] < target[z]), None)
        if accepted is None:
            return [*emitted, draw_plain(excess(target, draft), rng)]
        emitted.append(accepted)
    return emitted


RIGHT = [right_chain, right_truncated_chain, right_random_draft, right_stop_rule, right_deterministic_tree]
MUTANTS = [
    truncated_law_sent_but_full_law_sampled,
    beam_draft_treated_as_a_sample,
    draft_token_dropped_for_its_own_low_probability,
    residual_from_the_wrong_side,
    residual_renormalized_twice,
    residual_is_the_target,
    random_tokens_on_a_miss_verified_by_match,
    coupled_noise_reused_for_the_residual,
    draft_randomness_used_again,
    independent_accept_per_node_of_a_deterministic_tree,
    independent_accept_per_node_of_a_sampled_tree,
]


def p_value(rule: Mutant, seed: int) -> float:
    # Four tokens: with three and top-2 or two children too little is left outside for a mistake to show.
    toy = make_toy("far", seed=20, vocab_size=4, length=2)
    if rule is coupled_noise_reused_for_the_residual:  # shows best with many tokens
        toy = make_toy("far", seed=20, vocab_size=12, length=1)
    return toy.p_value(lambda prefix, rng: rule(toy, prefix, rng), NUM_DRAWS, seed)


@pytest.mark.parametrize("rule", RIGHT, ids=lambda rule: rule.__name__)
def test_the_right_rules_pass(rule: Mutant) -> None:
    assert p_value(rule, seed=21) > SMALLEST_P_VALUE


@pytest.mark.parametrize("rule", MUTANTS, ids=lambda rule: rule.__name__)
def test_the_wrong_rules_are_rejected(rule: Mutant) -> None:
    # Far under the threshold: a rejection by luck would be no evidence.
    assert p_value(rule, seed=21) < 1e-12


def test_a_token_outside_the_law_that_is_sent_is_refused_on_the_wire() -> None:
    """The first mutant cannot even reach the verifier when its token is outside the truncated law."""
    law = SparseLaw((0, 1), (LAW_TOTAL - 1, 1))
    with pytest.raises(InvalidRequest):
        through_wire(Proposal(0, (2,), "toy", laws=(law,)))
