"""Toy target and draft models for exact statistics, and the chi-square that judges them.

A toy is a table: every prefix of at most `length` tokens has an arbitrary target law and an arbitrary draft law over
a handful of tokens. The true joint law of the first `length` tokens is then the product along each path, and what
repeated rounds emit must follow it.
"""

from __future__ import annotations

import functools
import itertools
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from outrider.drafting.growth.laws import sparse_law
from outrider.shared import wire
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw
from outrider.v1 import common_pb2

NUM_DRAFT_TOKENS = 3  # gamma
# Seeds are fixed, so a test always passes or always fails; a correct rule has one chance in 10,000 per seed.
SMALLEST_P_VALUE = 1e-4

Prefix = tuple[int, ...]
# Emits the tokens of one round after a prefix.
RoundRule = Callable[[Prefix, random.Random], Sequence[int]]


@dataclass(frozen=True)
class Toy:
    """`target` and `draft` give float64 [V] for every prefix that a round of a sequence of `length` can ask for."""

    vocab_size: int
    length: int
    target: dict[Prefix, NDArray[np.float64]]
    draft: dict[Prefix, NDArray[np.float64]]

    def law_after(self, prefix: Prefix) -> NDArray[np.float64]:
        """Target's log-weights, deliberately unnormalized."""
        return self._log_weights[prefix]

    @functools.cached_property
    def _log_weights(self) -> dict[Prefix, NDArray[np.float64]]:
        with np.errstate(divide="ignore"):
            return {prefix: np.log(probs) + 1.5 for prefix, probs in self.target.items()}

    @functools.cached_property
    def sparse(self) -> dict[Prefix, SparseLaw]:
        """The draft laws as the drafter makes them: integer counts that sum to LAW_TOTAL."""
        with np.errstate(divide="ignore"):
            return {prefix: sparse_law(np.log(probs)) for prefix, probs in self.draft.items()}

    def joint(self) -> NDArray[np.float64]:
        """float64 [V ** length]: the target's law of all sequences, by enumeration."""
        return np.array(
            [
                np.prod([self.target[sequence[:place]][token] for place, token in enumerate(sequence)])
                for sequence in itertools.product(range(self.vocab_size), repeat=self.length)
            ]
        )

    def simulate(self, emit: RoundRule, num_draws: int, seed: int) -> NDArray[np.int64]:
        """Counts [V ** length] of the first tokens of repeated rounds."""
        rng = random.Random(seed)
        counts: Counter[Prefix] = Counter()
        for _ in range(num_draws):
            sequence: Prefix = ()
            while len(sequence) < self.length:
                sequence += tuple(emit(sequence, rng))
            counts[sequence[: self.length]] += 1
        every = itertools.product(range(self.vocab_size), repeat=self.length)
        return np.array([counts[sequence] for sequence in every])

    def p_value(self, emit: RoundRule, num_draws: int, seed: int) -> float:
        return chi_square_p_value(self.simulate(emit, num_draws, seed), self.joint())


def make_toy(kind: str, seed: int, vocab_size: int = 3, length: int = 3) -> Toy:
    """kind: "near" (draft close to target), or adversarial: "far", "reversed", "disjoint", "certain", "holes"."""
    rng = np.random.default_rng(seed)
    target: dict[Prefix, NDArray[np.float64]] = {}
    draft: dict[Prefix, NDArray[np.float64]] = {}
    # A round starts before `length` and looks at most NUM_DRAFT_TOKENS further.
    for depth in range(length + NUM_DRAFT_TOKENS):
        for prefix in itertools.product(range(vocab_size), repeat=depth):
            target[prefix], draft[prefix] = _laws(kind, rng, vocab_size)
    return Toy(vocab_size, length, target, draft)


def _laws(kind: str, rng: np.random.Generator, vocab_size: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    target_probs = rng.dirichlet(np.ones(vocab_size))
    if kind == "near":
        return target_probs, 0.7 * target_probs + 0.3 * rng.dirichlet(np.ones(vocab_size))
    if kind == "far":
        return target_probs, rng.dirichlet(np.ones(vocab_size))
    if kind == "reversed":
        order = np.argsort(target_probs)
        draft_probs = np.empty(vocab_size)
        draft_probs[order] = target_probs[order[::-1]]
        return target_probs, draft_probs
    if kind == "certain":  # the draft is sure of one token; now and then so is the target
        if rng.random() < 0.3:
            target_probs = np.eye(vocab_size)[rng.integers(vocab_size)]
        return target_probs, np.eye(vocab_size)[rng.integers(vocab_size)]
    half = max(1, vocab_size // 2)
    inside = np.isin(np.arange(vocab_size), rng.permutation(vocab_size)[:half])
    if kind == "disjoint":
        draft_probs = np.where(inside, rng.dirichlet(np.ones(vocab_size)), 0.0)
        target_probs = np.where(inside, 0.0, target_probs)
        return target_probs / target_probs.sum(), draft_probs / draft_probs.sum()
    if kind == "holes":  # each side has tokens that the other never says
        draft_probs = np.where(np.roll(inside, 1), 0.0, rng.dirichlet(np.ones(vocab_size)))
        target_probs = np.where(inside, 0.0, target_probs)
        return target_probs / target_probs.sum(), draft_probs / draft_probs.sum()
    raise ValueError(kind)


def chi_square_p_value(counts: NDArray[np.int64], probs: NDArray[np.float64], smallest_cell: float = 10.0) -> float:
    """Cells with fewer expected counts are pooled; anything seen where the law has no mass gives 0."""
    if counts[probs == 0].any():
        return 0.0
    expected = probs * counts.sum()
    common = expected >= smallest_cell
    found = np.append(counts[common], counts[~common].sum()).astype(float)
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] < smallest_cell:  # too little even when pooled: into the smallest of the others
        smallest = int(np.argmin(wanted[:-1]))
        found[smallest] += found[-1]
        wanted[smallest] += wanted[-1]
        found, wanted = found[:-1], wanted[:-1]
    return float(stats.chisquare(found, wanted * found.sum() / wanted.sum()).pvalue)


def draw_plain(probs: Sequence[float], rng: random.Random) -> int:
    """One index from weights that need not be normalized."""
    cumulative = list(itertools.accumulate(probs))
    place = bisect_right(cumulative, rng.random() * cumulative[-1])
    while place >= len(probs) or not probs[place]:
        place -= 1
    return place


def draw_from_counts(law: SparseLaw, rng: random.Random) -> int:
    return law.token_ids[bisect_right(_cumulative_counts(law), int(rng.random() * LAW_TOTAL))]


@functools.lru_cache(maxsize=100_000)
def _cumulative_counts(law: SparseLaw) -> tuple[int, ...]:
    return tuple(itertools.accumulate(law.counts))


@functools.lru_cache(maxsize=100_000)
def through_wire(proposal: Proposal) -> Proposal:
    """To bytes and back."""
    data = wire.proposal_to_wire(proposal).SerializeToString()
    return wire.proposal_from_wire(common_pb2.Proposal.FromString(data))


def path_to(proposal: Proposal, node: int) -> Prefix:
    path: list[int] = []
    while node >= 0:
        path.append(proposal.token_ids[node])
        node = proposal.parents[node] if proposal.parents else node - 1
    return tuple(path[::-1])
