"""Alternates draft variants on the same requests, and their ratios: for never_slower_held_out.

Not here: the requests and the stack (stack_cells).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.load import Shape

# tokens; the longest draft that `auto` may choose.
MAX_DRAFT_TOKENS = 5
# Same as "off": their difference is the measurement's noise.
CONTROL = "off again"
# ratio to "off"; what `auto` promises to reach
PROMISED = 0.97
# seed of sampled requests; fixed, so that exact mode gives every variant the same tokens
_SEED = 7


@dataclass(frozen=True)
class Draft:
    """The drafts of a request: `off`, `auto` (up to num_tokens) or a method with a fixed length."""

    method: str
    num_tokens: int


@dataclass(frozen=True)
class Measured:
    """One run of one variant. score: larger is faster; tokens/s unless the traffic defines another."""

    score: float
    token_ids: list[list[int]]


def variants(method: str, lengths: Sequence[int]) -> dict[str, Draft]:
    """Off, auto, off again, and the method at each fixed length."""
    off = Draft("off", MAX_DRAFT_TOKENS)
    fixed = {f"{length} tokens": Draft(method, length) for length in lengths}
    return {"off": off, "auto": Draft("auto", MAX_DRAFT_TOKENS), CONTROL: off} | fixed


def shape_for(draft: Draft, max_tokens: int, temperature: float = 0.0, cache_salt: str = "") -> Shape:
    """A request whose tokens do not depend on the draft: greedy, or sampled in exact mode with a seed."""
    seed = _SEED if temperature else None
    mode = "exact" if seed else None
    return Shape(max_tokens, draft.method, draft.num_tokens, temperature, seed, mode=mode, cache_salt=cache_salt)


def take_turns(names: Sequence[str], rounds: int, run: Callable[[str, int], Measured]) -> dict[str, list[float]]:
    """Scores of all rounds by variant. run(variant, round): rounds count from 0.

    The order alternates back and forth, so a machine that gets slower or faster favours no variant. Raises RuntimeError
    when two runs give different tokens.
    """
    scores: dict[str, list[float]] = {name: [] for name in names}
    expected: list[list[int]] | None = None
    for round_index in range(rounds):
        for name in names[:: -1 if round_index % 2 else 1]:
            measured = run(name, round_index)
            scores[name].append(measured.score)
            expected = measured.token_ids if expected is None else expected
            if measured.token_ids != expected:
                raise RuntimeError(f"variants gave different tokens: {name!r} in round {round_index}, {names[0]!r}")
    return scores


def ratio(scores: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of the ratio within a round."""
    return median(score / other for score, other in zip(scores, others, strict=True))


def best_fixed(scores: dict[str, list[float]]) -> str:
    """The fastest variant of fixed length, `off` included (length 0), by its median."""
    return max((name for name in scores if name not in ("auto", CONTROL)), key=lambda name: median(scores[name]))
