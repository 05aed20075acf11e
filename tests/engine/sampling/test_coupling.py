"""The shared noise: its hash against a plain transcription, its uniformity and independence, and the law it draws."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider.engine.sampling import coupling
from outrider.engine.sampling.coupling import coupled_ranking, coupled_sample, exponentials, noise_words

NUM_DRAWS = 200_000
# All seeds are fixed: a test either always passes or always fails.
SMALLEST_P_VALUE = 1e-4
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def splitmix64_next(state: int) -> int:
    """The reference generator (Steele, Lea, Flood 2014): add the golden gamma, then mix."""
    state = (state + 0x9E3779B97F4A7C15) & MASK64
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK64
    return z ^ (z >> 31)


def murmur3_fmix32(h: int) -> int:
    h ^= h >> 16
    h = (h * 0x85EBCA6B) & MASK32
    h ^= h >> 13
    h = (h * 0xC2B2AE35) & MASK32
    return h ^ (h >> 16)


def plain_noise_word(key: int, output_index: int, token_id: int) -> int:
    mixed = splitmix64_next(splitmix64_next(key) ^ output_index)
    low, high = mixed & MASK32, mixed >> 32
    return murmur3_fmix32(murmur3_fmix32((token_id * 0x9E3779B1 + low) & MASK32) ^ high)


def test_published_values_of_the_two_hashes() -> None:
    # The first outputs of splitmix64 seeded with 0 and with 1234567, and murmur3's finalizer.
    assert splitmix64_next(0) == 0xE220A8397B1DCDAF
    assert splitmix64_next(1234567) == 6457827717110365317
    assert murmur3_fmix32(0) == 0
    assert murmur3_fmix32(1) == 0x514E28B7


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, MASK64), st.integers(0, 2**40), st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5))
def test_noise_words_equal_a_plain_transcription(key: int, output_index: int, token_ids: list[int]) -> None:
    words = noise_words(key, output_index, np.array(token_ids, dtype=np.uint32))
    assert words.tolist() == [plain_noise_word(key, output_index, token_id) for token_id in token_ids]


def many_exponentials(num_keys: int, num_indices: int, num_tokens: int) -> np.ndarray:
    """float64 [keys, indices, tokens]; keys and indices small and consecutive, the hardest case for a hash."""
    token_ids = np.arange(num_tokens, dtype=np.uint32)
    return np.array([[exponentials(key, index, token_ids) for index in range(num_indices)] for key in range(num_keys)])


@pytest.mark.parametrize("shape", [(1, 1, NUM_DRAWS), (1, 2000, 100), (2000, 1, 100), (100, 200, 10)])
def test_exponentials_are_exponential_along_every_axis(shape: tuple[int, int, int]) -> None:
    drawn = many_exponentials(*shape).ravel()
    assert stats.kstest(drawn, "expon").pvalue > SMALLEST_P_VALUE
    bins = np.bincount((-np.expm1(-drawn) * 1000).astype(int), minlength=1000)
    assert stats.chisquare(bins).pvalue > SMALLEST_P_VALUE
    assert drawn.min() > 0.0


def test_the_small_values_that_win_the_race_are_resolved() -> None:
    drawn = many_exponentials(1, 1, 4_000_000).ravel()
    small = np.sort(drawn[drawn < 1e-4])
    assert abs(len(small) - 400) < 5 * 20
    assert stats.kstest(small / 1e-4, "uniform").pvalue > SMALLEST_P_VALUE


@pytest.mark.parametrize("lag", [1, 2, 3, 16, 64])
@pytest.mark.parametrize("axis", [0, 1, 2], ids=["stream keys", "output indices", "token ids"])
def test_neighbours_are_independent(axis: int, lag: int) -> None:
    shape = [20, 20, 20]
    shape[axis] = 700
    uniforms = np.moveaxis(-np.expm1(-many_exponentials(*shape)), axis, 0)
    first, second = uniforms[:-lag].ravel(), uniforms[lag:].ravel()
    assert stats.pearsonr(first, second).pvalue > SMALLEST_P_VALUE
    cells = np.bincount((first * 16).astype(int) * 16 + (second * 16).astype(int), minlength=256)
    assert stats.chisquare(cells).pvalue > SMALLEST_P_VALUE


def test_single_bit_changes_of_the_key_change_everything() -> None:
    token_ids = np.arange(2000, dtype=np.uint32)
    base = noise_words(12345, 3, token_ids)
    for bit in range(64):
        flipped = noise_words(12345 ^ (1 << bit), 3, token_ids)
        changed = np.unpackbits((base ^ flipped).view(np.uint8)).mean()
        assert abs(changed - 0.5) < 0.012, f"bit {bit} of the key changes {changed:.3f} of the bits"


LAWS = {
    "flat": np.full(16, 1 / 16),
    "steep": 0.5 ** np.arange(1, 13) / (1 - 0.5**12),
    "holes": np.array([0.0, 0.4, 0.0, 0.1, 0.25, 0.0, 0.2, 0.05]),
    "rare": np.array([0.001, 0.9, 0.002, 0.05, 0.04, 0.0005, 0.0055, 0.001]),
}


@pytest.mark.parametrize(
    ("name", "num_draws"), [("steep", NUM_DRAWS), ("holes", NUM_DRAWS), ("flat", 60_000), ("rare", 60_000)]
)
def test_coupled_samples_follow_the_law(name: str, num_draws: int) -> None:
    """Over stream keys and over output indices, together with the independence of one index from the next."""
    probs = LAWS[name]
    with np.errstate(divide="ignore"):
        log_weights = np.log(probs) + 3.7  # need not be normalized
    indices = 20
    drawn = np.array(
        [coupled_sample(log_weights, key, index) for key in range(num_draws // indices) for index in range(indices)]
    )
    counts = np.bincount(drawn, minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    support = probs > 0
    assert stats.chisquare(counts[support], probs[support] * len(drawn)).pvalue > SMALLEST_P_VALUE
    by_key = drawn.reshape(-1, indices)
    pairs = by_key[:, :-1].ravel() * len(probs) + by_key[:, 1:].ravel()
    expected = np.outer(probs, probs).ravel() * len(pairs)
    common = expected >= 10
    found = np.bincount(pairs, minlength=len(probs) ** 2)
    found, expected = (
        np.append(found[common], found[~common].sum()),
        np.append(expected[common], expected[~common].sum()),
    )
    if expected[-1] < 10:
        found, expected = found[:-1], expected[:-1] * found[:-1].sum() / expected[:-1].sum()
    assert stats.chisquare(found, expected).pvalue > SMALLEST_P_VALUE


def test_the_ranking_draws_without_replacement() -> None:
    """The first two of the race: P(a, b) = w_a * w_b / (1 - w_a), as of Gumbel-top-k."""
    probs = np.array([0.5, 0.2, 0.2, 0.1])
    counts: dict[tuple[int, ...], int] = {}
    for key in range(40_000):
        pair = tuple(coupled_ranking(np.log(probs), key, 5, count=2).tolist())
        counts[pair] = counts.get(pair, 0) + 1
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    expected = [40_000 * probs[a] * probs[b] / (1 - probs[a]) for a, b in pairs]
    assert stats.chisquare([counts.get(pair, 0) for pair in pairs], expected).pvalue > SMALLEST_P_VALUE


def test_the_ranking_starts_with_the_sample_and_ends_with_the_support() -> None:
    log_weights = np.array([-np.inf, 0.0, -1.0, -np.inf, 2.0])
    for key in range(200):
        ranking = coupled_ranking(log_weights, key, 0, count=4).tolist()
        assert sorted(ranking) == [1, 2, 4]
        assert ranking[0] == coupled_sample(log_weights, key, 0)
        assert ranking[:2] == coupled_ranking(log_weights, key, 0, count=2).tolist()


def test_scaling_the_weights_by_a_power_of_two_changes_nothing() -> None:
    weights = np.log(np.random.default_rng(0).dirichlet(np.ones(50)))
    for key in range(300):
        assert coupled_sample(weights, key, 1) == coupled_sample(weights + 64.0, key, 1)


def test_ties_go_to_the_smallest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        coupling, "noise_words", lambda _key, _index, token_ids: np.full(len(token_ids), 77, dtype=np.uint32)
    )
    log_weights = np.array([-np.inf, -2.0, 0.0, -1.0, 0.0, 0.0])
    assert coupled_sample(log_weights, 0, 0) == 2
    assert coupled_ranking(log_weights, 0, 0, count=9).tolist() == [2, 4, 5, 3, 1]


@pytest.mark.parametrize(
    "log_weights",
    [
        np.random.default_rng(1).normal(0, 3, 50_000),  # a law as a model has it: few tokens hold most of the mass
        np.random.default_rng(2).normal(0, 0.1, 5_000),  # all tokens are likely
        np.append(0.0, np.full(50_000, -10.5)),  # more than half of the mass lies with tokens that are unlikely each
        np.append(np.full(50_000, -22.0), [0.0, -30.0, -np.inf]),
        np.append(np.full(5_000, -np.inf), [5.0, -12.0]),
    ],
    ids=["model", "flat", "long tail", "very long tail", "few"],
)
def test_a_race_of_contenders_is_the_race_of_all(log_weights: np.ndarray) -> None:
    """Against the definition, over the whole vocabulary: argmin of E / w."""
    token_ids = np.arange(len(log_weights), dtype=np.uint32)
    unlikely = 0
    for index in range(200):
        arrivals = np.log(exponentials(9, index, token_ids)) - log_weights
        order = np.argsort(arrivals, kind="stable")
        assert coupled_sample(log_weights, 9, index) == order[0]
        expected = [token for token in order[:4].tolist() if log_weights[token] > -np.inf]
        assert coupled_ranking(log_weights, 9, index, count=4).tolist() == expected
        unlikely += log_weights[order[0]] < log_weights.max() - 10.0
    assert unlikely > 60 if log_weights[1] == -10.5 else unlikely < 20


def test_an_empty_support_raises() -> None:
    with pytest.raises(ValueError, match="empty"):
        coupled_sample(np.full(4, -np.inf), 0, 0)


def test_two_laws_meet_at_least_as_often_as_the_bound() -> None:
    """Acceptance of the race is at least (1 - TV) / (1 + TV) (Bavarian et al. 2016) and at most 1 - TV."""
    rng = np.random.default_rng(3)
    for _ in range(3):
        target_probs, draft_probs = rng.dirichlet(np.ones(12), size=2)
        distance = 0.5 * np.abs(target_probs - draft_probs).sum()
        met = np.mean(
            [
                coupled_sample(np.log(target_probs), key, 0) == coupled_sample(np.log(draft_probs), key, 0)
                for key in range(4000)
            ]
        )
        assert (1 - distance) / (1 + distance) - 0.03 < met < 1 - distance + 0.03


def rows_of_all_kinds(rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Peaked, flat and truncated, with ties, infinities, and what is no number."""
    for num_tokens, spread in ((1, 1.0), (7, 1.0), (300, 3.0), (4096, 0.0), (4096, 0.1), (4096, 3.0), (4097, 12.0)):
        for turn in range(60):
            row = spread * rng.standard_normal(num_tokens)
            if turn % 3 == 1:
                row[rng.random(num_tokens) < 0.7] = -np.inf
            if turn % 5 == 1:
                row[rng.integers(num_tokens)] = np.nan
            if np.isfinite(row).any():
                yield row - np.nanmax(row)


def test_the_winner_is_who_arrives_first_of_all() -> None:
    """Neither the compiled race nor numpy's looks at everybody."""
    for index, row in enumerate(rows_of_all_kinds(np.random.default_rng(3))):
        everybody = np.arange(len(row), dtype=np.uint32)
        arrivals = np.log(exponentials(21, index, everybody)) - row
        winner = int(np.nanargmin(arrivals))
        assert coupled_sample(row, 21, index) == winner
        if not np.isnan(row).any():
            assert coupled_ranking(row, 21, index)[0] == winner


def test_an_unlikely_token_may_win() -> None:
    """Weights of e^-10.5 of the largest are no part of the first look; where they are many, they win at times."""
    row = np.full(20_000, -10.5)
    row[0] = 0.0
    winners = [coupled_sample(row, 22, index) for index in range(400)]
    unlikely = sum(winner != 0 for winner in winners)
    share = 19_999 * math.exp(-10.5) / (1.0 + 19_999 * math.exp(-10.5))
    assert abs(unlikely / 400 - share) < 4 * math.sqrt(share * (1 - share) / 400)


@pytest.mark.parametrize("value", [-np.inf, np.nan])
def test_nobody_wins_where_no_token_has_weight(value: float) -> None:
    with pytest.raises(ValueError, match="support"):
        coupled_sample(np.full(5, value), 1, 2)
