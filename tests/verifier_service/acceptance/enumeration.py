"""The exact law of an acceptance rule: every draft, and every way its random numbers can fall, with its probability.

The rule under test runs as it is, on a generator whose numbers are not drawn: at each comparison (`u <= h`,
`u * q < p`) and each search in a cumulative sum, the run forks with the probabilities that a uniform number would
have. A wrong law shows at 1e-9, not at 1e-2 as in samples.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np

from outrider.shared.messages import Proposal, SparseLaw
from outrider.verifier_service.acceptance.outcome import Acceptance, LawAt
from outrider.verifier_service.acceptance.standard import dense_law
from tests.verifier_service.acceptance.toy import Prefix, Toy, make_toy, path_to, through_wire

Rule = Callable[..., Acceptance]
Law = dict[Prefix, float]
Result = TypeVar("Result")


class _Fork:
    """Plays one run along a script of choices and writes down what other choices there were."""

    def __init__(self, script: Sequence[int]) -> None:
        self._script = list(script)
        self.choices: list[tuple[int, list[int]]] = []
        self.probability = 1.0

    def choose(self, probs: Sequence[float]) -> int:
        """An option with mass: the script's, or the first one."""
        options = [option for option, prob in enumerate(probs) if prob > 0.0]
        step = len(self.choices)
        option = self._script[step] if step < len(self._script) else options[0]
        self.choices.append((option, options))
        self.probability *= float(probs[option])
        return option

    def random(self) -> _Uniform:
        return _Uniform(self)


class _Uniform:
    """A number that is uniform on [0, scale) until it is compared, which may happen once."""

    def __init__(self, fork: _Fork, scale: float = 1.0) -> None:
        self._fork: _Fork | None = fork
        self._scale = scale

    def __mul__(self, factor: float) -> _Uniform:
        return _Uniform(self._take(), self._scale * float(factor))

    def __lt__(self, bound: float) -> bool:
        below = min(1.0, max(0.0, float(bound) / self._scale)) if self._scale else float(bound > 0.0)
        return self._take().choose([1.0 - below, below]) == 1

    def __le__(self, bound: float) -> bool:
        return self < bound if self._scale or bound else True

    def __ge__(self, bound: float) -> bool:
        return not self < bound

    def __array_function__(self, function: object, _types: object, args: Any, kwargs: Any) -> int:
        """numpy's dispatch: `searchsorted(cumulative, u, side="right")` lands in each interval by its width."""
        if function is not np.searchsorted or kwargs != {"side": "right"}:
            raise TypeError(f"{function} is not enumerated")
        widths = np.diff(np.asarray(args[0]), prepend=0.0) / self._scale
        return self._take().choose(widths.tolist())

    def _take(self) -> _Fork:
        if self._fork is None:
            raise RuntimeError("one random number was used twice")
        fork, self._fork = self._fork, None
        return fork


def every_run(run: Callable[[np.random.Generator], Result]) -> Iterator[tuple[Result, float]]:
    """Results of a function of a generator, with the probability of each way to get there."""
    script: list[int] = []
    while True:
        fork = _Fork(script)
        result = run(cast(np.random.Generator, fork))
        yield result, fork.probability
        choices = fork.choices
        while choices and choices[-1][0] == choices[-1][1][-1]:
            choices.pop()
        if not choices:
            return
        script = [option for option, _ in choices[:-1]]
        last, options = choices[-1]
        script.append(options[options.index(last) + 1])


def equal_toy(seed: int, vocab_size: int) -> Toy:
    """Target and draft laws are the same integer counts."""
    near = make_toy("near", seed, vocab_size, length=1)
    target = {prefix: dense_law(law, vocab_size) for prefix, law in near.sparse.items()}
    return Toy(vocab_size, near.length, target, near.draft)


def target_law(toy: Toy, length: int) -> Law:
    """Every sequence of `length` tokens with its probability under the target alone."""
    return continued(toy, (), 1.0, length)


def continued(toy: Toy, tokens: Prefix, weight: float, length: int) -> Law:
    """The law of the first `length` tokens when the target alone goes on after `tokens`."""
    law: Law = {tokens[:length]: weight}
    for _ in range(length - len(tokens)):
        law = {(*z, x): w * float(toy.target[z][x]) for z, w in law.items() for x in range(toy.vocab_size)}
    return law


@dataclass
class Enumerated:
    """`outputs`: emitted tokens -> probability. `reached[i]`: probability that at least i draft tokens are accepted."""

    outputs: Law = field(default_factory=lambda: defaultdict(float))
    reached: dict[int, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def mean_accepted(self) -> float:
        return sum(self.reached.values())

    def completed(self, toy: Toy, length: int) -> Law:
        """The law of the first `length` tokens when the target alone goes on after the round."""
        law: Law = defaultdict(float)
        for tokens, weight in self.outputs.items():
            for end, prob in continued(toy, tokens, weight, length).items():
                law[end] += prob
        return law


def enumerate_rule(rule: Rule, toy: Toy, drafts: Iterator[tuple[Proposal, float]]) -> Enumerated:
    """Every draft through the wire's bytes and the rule."""
    found = Enumerated()
    for draft, weight in drafts:
        proposal = through_wire(draft)
        law_at = _law_at(toy, proposal)
        for outcome, prob in every_run(lambda rng, at=law_at, sent=proposal: rule(at, sent, rng=rng)):  # type: ignore[misc]
            tokens = (*(proposal.token_ids[node] for node in outcome.accepted_nodes), outcome.final_token)
            found.outputs[tokens] += weight * prob
            for length in range(1, len(outcome.accepted_nodes) + 1):
                found.reached[length] += weight * prob
    return found


def _law_at(toy: Toy, proposal: Proposal) -> LawAt:
    return lambda node: toy.law_after(path_to(proposal, node))


def distance(found: Law, expected: Law) -> float:
    """Total variation."""
    keys = found.keys() | expected.keys()
    return 0.5 * sum(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in keys)


def chains(toy: Toy, length: int) -> Iterator[tuple[Proposal, float]]:
    """Every chain of `length` tokens that the draft laws can give."""
    return trees(toy, (1,) * length, as_chain=True)


def trees(toy: Toy, branching: Sequence[int], *, as_chain: bool = False) -> Iterator[tuple[Proposal, float]]:
    """Every tree with `branching[d]` children per node of depth d, drawn without replacement (fewer if mass ends)."""

    def draw(rng: np.random.Generator) -> Proposal:
        token_ids: list[int] = []
        parents: list[int] = []
        laws: list[SparseLaw] = []
        level: list[tuple[int, Prefix]] = [(-1, ())]
        for count in branching:
            below: list[tuple[int, Prefix]] = []
            for parent, prefix in level:
                for token in _without_replacement(toy.sparse[prefix], count, rng):
                    below.append((len(token_ids), (*prefix, token)))
                    token_ids.append(token)
                    parents.append(parent)
                    laws.append(toy.sparse[prefix])
            level = below
        return Proposal(0, tuple(token_ids), "toy", () if as_chain else tuple(parents), tuple(laws))

    return every_run(draw)


def _without_replacement(law: SparseLaw, count: int, rng: np.random.Generator) -> list[int]:
    left = dict(zip(law.token_ids, law.counts, strict=True))
    drawn: list[int] = []
    while left and len(drawn) < count:
        cumulative = np.cumsum(list(left.values()), dtype=np.float64)
        place = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
        token = list(left)[int(place)]
        drawn.append(token)
        del left[token]
    return drawn
