"""The shared noise of exact mode: one exponential variable per (stream key, output index, token id).

    E(s, t, j) = -ln(1 - U(hash(s, t, j)))         sample(w; s, t) = argmin over j with w_j > 0 of E(s, t, j) / w_j

The race draws j with probability w_j / sum(w), like Gumbel-max. Drafter and verifier use the same key and index, so
they agree whenever their laws are close; only token ids cross the wire.

The hash is counter-based: an index's key is two rounds of splitmix64 (Steele, Lea, Flood 2014), a token's word two
rounds of murmur3's 32-bit finalizer over its id. Any change here changes NOISE_VERSION.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

NOISE_VERSION = 1
_MASK64 = (1 << 64) - 1
_EARLIEST = -33.0 * math.log(2.0)  # log; of the smallest uniform
_LIKELY = 10.0  # log weight below the largest; in flat laws a few thousand of 152,000 tokens are within it
_SLACK = 1e-9  # log; exceeds any rounding of a logarithm


def index_key(key: int, output_index: int) -> tuple[int, int]:
    """Returns the two 32-bit words that key the noise of one output index."""
    mixed = _splitmix64(_splitmix64(key) ^ output_index)
    return mixed & 0xFFFFFFFF, mixed >> 32


def noise_words(key: int, output_index: int, token_ids: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Returns uint32 [N]: the hash of every token id at one output index."""
    low, high = index_key(key, output_index)
    words = token_ids * np.uint32(0x9E3779B1) + np.uint32(low)
    words = _fmix32(words)
    words ^= np.uint32(high)
    return _fmix32(words)


def exponentials(key: int, output_index: int, token_ids: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Returns float64 [N], each Exp(1), with full resolution near 0, since small values win the race."""
    uniforms = (noise_words(key, output_index, token_ids).astype(np.float64) + 0.5) * 2.0**-32
    return -np.log1p(-uniforms)


def coupled_ranking(log_weights: NDArray[np.float64], key: int, output_index: int, count: int = 1) -> NDArray[np.int64]:
    """Returns the first `count` token ids of the race, best first; fewer if the support is smaller.

    Ties go to the smallest id. `log_weights`: float64 [V], -inf outside the support.
    """
    contenders, arrival = contenders_of(log_weights, key, output_index, count)
    if count == 1:
        return np.array([contenders[np.argmin(arrival)]])
    winners: NDArray[np.int64] = contenders[np.argsort(arrival, kind="stable")[:count]]
    return winners


def contenders_of(
    log_weights: NDArray[np.float64], key: int, output_index: int, count: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Returns ascending token ids that include the first `count` of the race, and their log arrival times.

    They are all likely tokens, and any other that may arrive in time: since E >= U, a token of weight w needs U <= w *
    (the count-th likely arrival), which its hash decides without a logarithm. Normal logits of standard deviation 5, 3,
    1, 151,936 tokens: 0.3, 0.7, 1.0 ms; a race of all tokens 0.9 ms.
    """
    lowest_likely = log_weights.max() - _LIKELY
    likely = np.flatnonzero(log_weights > lowest_likely)
    if len(likely) < count:
        support = np.flatnonzero(log_weights > -np.inf)
        return support, _arrivals(support, log_weights, key, output_index)
    arrival = _arrivals(likely, log_weights, key, output_index)
    last_in_time = np.partition(arrival, count - 1)[count - 1] + _SLACK
    others = np.flatnonzero((log_weights <= lowest_likely) & (log_weights >= _EARLIEST - last_in_time))
    words = noise_words(key, output_index, others.astype(np.uint32))
    largest_word = math.exp(min(last_in_time + lowest_likely, 0.0)) * 2.0**32
    others = others[words <= largest_word]
    if not len(others):
        return likely, arrival
    contenders = np.sort(np.concatenate((likely, others)))
    return contenders, _arrivals(contenders, log_weights, key, output_index)


def perturbed_log_weights(log_weights: NDArray[np.float64], key: int, output_index: int) -> NDArray[np.float64]:
    """Returns float64 [V]: log(w / E); the largest entries win the race."""
    support = np.flatnonzero(log_weights > -np.inf)
    perturbed = np.full_like(log_weights, -np.inf)
    perturbed[support] = -_arrivals(support, log_weights, key, output_index)
    return perturbed


def _arrivals(
    token_ids: NDArray[np.int64], log_weights: NDArray[np.float64], key: int, output_index: int
) -> NDArray[np.float64]:
    arrivals: NDArray[np.float64] = np.log(exponentials(key, output_index, token_ids.astype(np.uint32)))
    return arrivals - log_weights[token_ids]


def coupled_sample(log_weights: NDArray[np.float64], key: int, output_index: int) -> int:
    """Returns the token that wins the race. Raises ValueError if the support is empty."""
    race = compiled_race()
    if race is None:
        return int(coupled_ranking(log_weights, key, output_index)[0])
    winner = race(log_weights, index_key(key, output_index))
    if winner < 0:
        raise ValueError("no token can win: the support is empty")
    return winner


@functools.cache
def compiled_race() -> Callable[[NDArray[np.float64], tuple[int, int]], int] | None:
    """Returns kernels/coupled_sample/cpu, compiled (seconds the first time); None without numba."""
    try:
        from outrider.kernels.coupled_sample.cpu import race
    except ImportError:
        return None
    race(np.zeros(1), (0, 0))
    return race


def _fmix32(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    words = words ^ (words >> np.uint32(16))
    words = words * np.uint32(0x85EBCA6B)
    words ^= words >> np.uint32(13)
    words *= np.uint32(0xC2B2AE35)
    words ^= words >> np.uint32(16)
    return words


def _splitmix64(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK64
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK64
    return state ^ (state >> 31)
