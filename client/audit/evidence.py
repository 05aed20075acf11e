"""Anytime-valid tests of "each token was drawn from the stated law": e-processes over coarse outcomes.

The outcomes of a position are the K listed tokens and "any other". Each family of alternatives is a mixture of
likelihood ratios with mean 1 under the law given the past, so it may be looked at after every token. Nothing here may
depend on what comes later: where a chunk of a stream ends, or which lists are missing, is known only afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# chance of any false alarm in one run, however long it is and however often it is looked at
FALSE_ALARM = 1e-3
# probability below which an outcome counts as impossible: printed log-probabilities are rounded
_IMPOSSIBLE = 1e-12
_TILTS = (-1.0, -0.4, -0.15, -0.05, 0.05, 0.15, 0.4, 1.0)
_TEMPERATURE_TILTS = (-0.4, -0.15, -0.05, -0.025, 0.025, 0.05, 0.15, 0.4, 1.0)
_GREEDY_SHARES = (0.01, 0.03, 0.1, 0.3, 0.9)
_DEPENDENCES = (-0.9, -0.3, 0.3, 0.9)
_NOISE_SHARES = (0.1, 0.4, 0.9)
_NOISE_BINS = 24
_NOISE_WINDOW = 0.06  # half width, in units of the transform
_UNLIKELY = 0.1  # probability


@dataclass(frozen=True)
class Draw:
    """One drawn token under the law that it should follow."""

    logprobs: tuple[float, ...]  # listed tokens, most likely first
    rest: float | None  # probability of all other tokens; None: the law is conditional on the listed ones
    rank: int  # of the drawn token among the listed ones; -1: another one
    request: int
    index: int  # place in its answer
    repeated: tuple[bool, ...]  # whether each listed token occurred before in the answer


@dataclass(frozen=True)
class Evidence:
    """What a sequence of draws says against its law."""

    num_tokens: int
    ln_e: float  # the largest value that the e-process reached
    found_at: int | None  # tokens after which it crossed the limit
    family: str
    num_impossible: int
    temperature: tuple[float, float]  # ratio to the stated one, and half a 95 % interval
    greedy_share: tuple[float, float]

    @property
    def is_broken(self) -> bool:
        return self.found_at is not None or self.num_impossible > 0


class _Columns:
    """Draws as arrays; probabilities are normalised over the outcomes."""

    def __init__(self, draws: Sequence[Draw]) -> None:
        count, width = len(draws), max(len(draw.logprobs) for draw in draws)
        logs = np.full((count, width), -np.inf)
        self.repeated = np.zeros((count, width))
        for row, draw in enumerate(draws):
            logs[row, : len(draw.logprobs)] = draw.logprobs
            self.repeated[row, : len(draw.repeated)] = draw.repeated
        conditional = np.array([draw.rest is None for draw in draws])
        self.rank = np.array([draw.rank for draw in draws])
        rest = np.array([0.0 if draw.rest is None else max(draw.rest, 0.0) for draw in draws])
        weights = np.exp(np.where(conditional[:, None], logs - logs.max(axis=1, keepdims=True), logs))
        total = weights.sum(axis=1) + rest
        self.p, self.rest = weights / total[:, None], rest / total
        self.logs = np.log(np.where(self.p > 0, self.p, 1e-26))
        self.skip = conditional & (self.rank < 0)  # outside of what the law is conditional on: no information
        self.rows = np.arange(count)
        self.at = np.where(self.rank >= 0, self.rank, 0)
        self.chance = np.where(self.rank >= 0, self.p[self.rows, self.at], self.rest)
        self.impossible = (self.chance <= _IMPOSSIBLE) & ~self.skip

    def tilted(self, weights: Array, rest_weight: Array | float) -> Array:
        """Log of the likelihood ratio of the alternative p * weights at what was drawn."""
        mean = (self.p * weights).sum(axis=1) + self.rest * rest_weight
        drawn = np.where(self.rank >= 0, weights[self.rows, self.at], rest_weight)
        ratio = np.log(np.maximum(drawn, _IMPOSSIBLE)) - np.log(np.maximum(mean, 1e-300))
        return np.where(self.skip, 0.0, ratio)

    def transforms(self) -> Array:
        """The randomised probability integral transform: independent and uniform under the law."""
        noise = np.random.default_rng(0).random(len(self.rank))
        below = np.concatenate([np.zeros((len(self.rank), 1)), np.cumsum(self.p, axis=1)], axis=1)
        start = np.where(self.rank >= 0, below[self.rows, self.at], below[:, -1])
        value = np.clip(start + noise * self.chance, 0, 1 - 1e-12)
        return np.where(self.skip, noise, value)


def _marginal_families(columns: _Columns) -> dict[str, Array]:
    p, ones = columns.p, np.ones_like(columns.p)
    top = np.zeros_like(p)
    top[:, 0] = 1
    first = np.maximum(p[:, 0], 1e-9)
    last = np.log(np.maximum(np.where(p > 0, p, 1).min(axis=1), _IMPOSSIBLE) * 0.3)  # a token outside of the list
    unlikely = (p < _UNLIKELY).astype(float)

    def stacked(factors: Sequence[Array]) -> Array:
        return np.stack(factors, axis=1)

    greedy = [np.log(np.where(columns.rank == 0, 1 - share + share / first, 1 - share)) for share in _GREEDY_SHARES]
    return {
        "greedy share": np.where(columns.skip[:, None], 0.0, stacked(greedy)),
        "temperature": stacked(
            [columns.tilted(np.exp(tilt * columns.logs), np.exp(tilt * last)) for tilt in _TEMPERATURE_TILTS]
        ),
        "likeliest token": stacked([columns.tilted(np.exp(tilt * top), 1.0) for tilt in _TILTS]),
        "tail": stacked([columns.tilted(ones, math.exp(tilt)) for tilt in _TILTS]),
        "unlikely tokens": stacked([columns.tilted(np.exp(t * unlikely), math.exp(t)) for t in (-2.0, *_TILTS)]),
        "repeated token": stacked([columns.tilted(np.exp(tilt * columns.repeated), 1.0) for tilt in _TILTS]),
    }


def _dependence_families(draws: Sequence[Draw], columns: _Columns) -> dict[str, Array]:
    """Each factor's bet on a position is made from transforms of earlier positions only."""
    values = columns.transforms()
    neighbours, again, shared = (np.ones(len(draws)) for _ in range(3))
    neighbours[:] = 0
    seen: Array = np.zeros(_NOISE_BINS)
    before_at: dict[int, float] = {}
    for row, draw in enumerate(draws):
        starts = row == 0 or draws[row - 1].request != draw.request
        if starts:
            seen = np.zeros(_NOISE_BINS)
        elif draws[row - 1].index + 1 == draw.index:
            neighbours[row] = (2 * values[row - 1] - 1) * (2 * values[row] - 1)
        if columns.skip[row]:
            continue
        cell = min(int(values[row] * _NOISE_BINS), _NOISE_BINS - 1)
        again[row] = (seen[cell] + 4.0) / (seen.sum() + 4.0 * _NOISE_BINS) * _NOISE_BINS
        seen[cell] += 1
        past = before_at.get(draw.index)
        if past is not None:
            low, high = max(0.0, past - _NOISE_WINDOW), min(1.0, past + _NOISE_WINDOW)
            shared[row] = float(low <= values[row] <= high) / (high - low)
        before_at[draw.index] = values[row]
    return {
        "neighbours": np.stack([np.log1p(c * neighbours) for c in _DEPENDENCES], axis=1),
        "noise again": np.stack([np.log(1 - w + w * again) for w in _NOISE_SHARES], axis=1),
        "noise shared": np.stack([np.log(1 - w + w * shared) for w in _NOISE_SHARES], axis=1),
    }


def _log_mean_exp(values: Array, axis: int) -> Array:
    top = values.max(axis=axis, keepdims=True)
    mean: Array = np.log(np.exp(values - top).mean(axis=axis)) + top.squeeze(axis)
    return mean


def limit(weight: float) -> float:
    """ln e at which a condition of this weight raises the alarm; the weights of a run sum to 1 at most."""
    return math.log(1 / (FALSE_ALARM * weight))


def weigh(draws: Sequence[Draw], weight: float) -> Evidence:
    """The evidence of draws in the order in which they were made. Raises ValueError without draws."""
    if not draws:
        raise ValueError("no draws to weigh")
    columns = _Columns(draws)
    factors: Mapping[str, Array] = {**_marginal_families(columns), **_dependence_families(draws, columns)}
    wealth = {name: _log_mean_exp(np.cumsum(factor, axis=0), axis=1) for name, factor in factors.items()}
    total = _log_mean_exp(np.stack(list(wealth.values())), axis=0)
    crossed = np.nonzero(total >= limit(weight))[0]
    return Evidence(
        num_tokens=len(draws),
        ln_e=float(total.max()),
        found_at=int(crossed[0]) + 1 if len(crossed) else None,
        family=max(wealth, key=lambda name: float(wealth[name].max())),
        num_impossible=int(columns.impossible.sum()),
        temperature=_temperature(columns),
        greedy_share=_greedy_share(columns),
    )


def _temperature(columns: _Columns) -> tuple[float, float]:
    """Maximum likelihood over the listed tokens: the ratio of the real temperature to the stated one."""
    use = ~columns.skip & (columns.rank >= 0)
    if not use.any():
        return math.nan, math.inf
    logs, weights = columns.logs[use], columns.p[use]
    at, rank, exponent, spread = np.arange(len(logs)), columns.rank[use], 1.0, 0.0
    logs = np.where(weights > 0, logs, 0.0)
    for _ in range(12):
        law = np.where(weights > 0, np.exp(exponent * logs), 0.0)
        law /= law.sum(axis=1, keepdims=True)
        mean = (law * logs).sum(axis=1)
        spread = max(float(((law * logs * logs).sum(axis=1) - mean * mean).sum()), 1e-9)
        exponent = float(np.clip(exponent + (logs[at, rank] - mean).sum() / spread, 0.02, 20))
    return 1 / exponent, 1.96 / math.sqrt(spread) / exponent**2


def _greedy_share(columns: _Columns) -> tuple[float, float]:
    use = ~columns.skip
    if not use.any():
        return math.nan, math.inf
    first = np.maximum(columns.p[use, 0], 1e-6)
    information = max(float(((1 - first) / first).sum()), 1e-9)
    return float((((columns.rank[use] == 0) - first) / first).sum()) / information, 1.96 / math.sqrt(information)
