"""The noise words of numpy, torch and triton are the same, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from outrider.engine.sampling import coupling
from outrider.kernels.coupled_sample import noise
from outrider.kernels.sampling_support.triton_noise import log_exponentials, noise_words
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

KEYS = [0, 1, 2**32 - 1, 2**63 + 12345, 2**64 - 1, 0x0123456789ABCDEF]
INDICES = [0, 1, 4096, 2**31, 2**40 + 7]
TOKEN_IDS = np.concatenate([np.arange(500), [65535, 65536, 128255, 262143, 2**31 - 2, 2**31 - 1]]).astype(np.uint32)


@triton.jit
def words_kernel(ids_ptr, key_words_ptr, words_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, BLOCK)
    ids = tl.load(ids_ptr + places, mask=places < count, other=0)
    low_word = tl.load(key_words_ptr).to(tl.uint32, bitcast=True)
    high_word = tl.load(key_words_ptr + 1).to(tl.uint32, bitcast=True)
    words = noise_words(ids, low_word, high_word)
    tl.store(words_ptr + places, words.to(tl.int32, bitcast=True), mask=places < count)


@triton.jit
def arrivals_kernel(words_ptr, arrivals_ptr, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, BLOCK)
    words = tl.load(words_ptr + places, mask=places < count, other=0).to(tl.uint32, bitcast=True)
    tl.store(arrivals_ptr + places, log_exponentials(words), mask=places < count)


def as_int32(values: object) -> torch.Tensor:
    return torch.from_numpy(np.asarray(values).astype(np.uint32).view(np.int32)).to(device())


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("index", INDICES)
def test_words_are_the_engines(key: int, index: int) -> None:
    expected = coupling.noise_words(key, index, TOKEN_IDS)
    ids, key_words = as_int32(TOKEN_IDS), as_int32(coupling.index_key(key, index))
    assert np.array_equal(noise.noise_words(ids, key_words[None])[0].cpu().numpy(), expected)
    words = torch.full_like(ids, -1)
    words_kernel[(1,)](ids, key_words, words, len(TOKEN_IDS), BLOCK=512)
    assert np.array_equal(words.cpu().numpy().view(np.uint32), expected)


def test_log_exponentials_are_float32_accurate_and_finite_for_every_kind_of_word() -> None:
    generator = np.random.default_rng(0)
    edges = np.array([0, 1, 2, 2**24, 2**30, 1431655765, 1431655764, 2**31, 2**32 - 129, 2**32 - 128, 2**32 - 1])
    small = 2.0 ** generator.uniform(0, 32, 1500)
    words = np.concatenate([edges, small, generator.integers(0, 2**32, 2000)]).astype(np.uint32)
    arrivals = torch.full((len(words),), torch.nan, dtype=torch.float32, device=device())
    arrivals_kernel[(1,)](as_int32(words), arrivals, len(words), BLOCK=4096)
    mine = arrivals.cpu().numpy().astype(np.float64)
    exact = np.log(-np.log1p(-(words.astype(np.float64) + 0.5) * 2.0**-32))
    assert np.isfinite(mine).all()
    # The rounding of u to float32 is all but amplified where 1 - u is small: that is 2^-8 of the words, which lose.
    ordinary = words < 2**32 - 2**24
    assert np.abs(mine - exact)[ordinary].max() < 2e-5
    assert np.abs(mine - exact)[words < 2**31].max() < 3e-6
    order = np.argsort(words[ordinary], kind="stable")
    assert (np.diff(mine[ordinary][order]) > -1e-6).all()


def test_torch_exponentials_are_the_engines() -> None:
    ids = as_int32(TOKEN_IDS)
    for key in KEYS:
        expected = coupling.exponentials(key, 77, TOKEN_IDS)
        mine = noise.exponentials(ids, as_int32(coupling.index_key(key, 77))[None])[0].cpu().numpy()
        np.testing.assert_allclose(mine, expected, rtol=1e-14)
