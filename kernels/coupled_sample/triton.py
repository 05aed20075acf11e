"""Exact mode's sampler on a GPU: per row, the token that wins the race of exponential variables.

Temperature, top-k, top-p, min-p, then the argmin over the remaining tokens of log(E) - logit / temperature, with E from
the shared noise (engine/sampling/coupling.py); ties go to the smallest id. Temperature 0 is argmax. The race is float32
and may differ from a float64 one where the two best values agree within rounding: no result depends on that, since
drafts are checked against this kernel's result.

Three launches: the borders of truncated rows (kernels/sampling_support), the race of each (row, vocabulary chunk), the
best chunk of each row. Chunks have one size and a minimum is exact, so a row's token depends on that row alone.
256 float32 rows of 131,072 logits: 134 MB once, 40 us at 3.35 TB/s, 28 us at 4.8 TB/s. The race, at 84 instructions per
logit, takes 95 us (132 multiprocessors, 1.75 GHz) and is the bound.

Not here: penalties, bias, grammars, logprobs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.sampling_support.transforms import Transforms, check_logits, check_vector
from outrider.kernels.sampling_support.triton import RowLaws, row_laws
from outrider.kernels.sampling_support.triton_noise import log_exponentials, noise_words
from outrider.kernels.sampling_support.triton_race import best_of_chunks, chunk_share, chunk_winner, winners_share
from outrider.kernels.sampling_support.triton_tiles import LARGEST, in_support, key_shift, keys_of, load_tile

# logits per program, 16 KiB in float32; 8 warps of 16 logits per lane
_CHUNK = 4096
_NUM_WARPS = 8


def coupled_sample(logits: torch.Tensor, transforms: Transforms, key_words: torch.Tensor) -> torch.Tensor:
    """int64 [R]: the sampled token of each row; -1 for a row without a finite logit, which the host has to refuse.

    `logits`: [R, V], float32, bfloat16 or float16, rows contiguous; NaN counts as -inf. `key_words`: int32 [R, 2], low
    and high word of `engine.sampling.coupling.index_key`, wrapped into int32. Raises KernelArgumentError.
    """
    return _sample(logits, transforms, key_words, None)


def coupled_sample_with_shares(
    logits: torch.Tensor, transforms: Transforms, key_words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`coupled_sample`, and float32 [R]: the drafter's confidence in each token, its share of sum(1 / arrival).

    Equals the softmax of engine.sampling.coupling.perturbed_log_weights at the winner; 0 for a row without a token.
    """
    shares = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    return _sample(logits, transforms, key_words, shares), shares


def _sample(
    logits: torch.Tensor, transforms: Transforms, key_words: torch.Tensor, shares: torch.Tensor | None
) -> torch.Tensor:
    check_logits(logits)
    num_rows = logits.shape[0]
    check_vector("key_words", key_words, torch.int32, (num_rows, 2))
    laws = row_laws(logits, transforms, with_mass=False)
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _race(logits, laws, key_words, token_ids, shares)
    return token_ids


def _race(
    logits: torch.Tensor,
    laws: RowLaws,
    key_words: torch.Tensor,
    token_ids: torch.Tensor,
    shares: torch.Tensor | None,
) -> None:
    num_rows, vocab_size = logits.shape
    num_chunks = triton.cdiv(vocab_size, _CHUNK)
    values = torch.empty(num_rows, num_chunks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device)
    with_shares = shares is not None
    # Placeholders, not dereferenced without shares.
    sums = torch.empty_like(values) if with_shares else values
    shares = values if shares is None else shares
    _race_kernel[(num_rows * num_chunks,)](
        logits,
        logits.stride(0),
        laws.border_keys,
        laws.border_ids,
        laws.scales,
        key_words,
        values,
        ids,
        sums,
        VOCAB_SIZE=vocab_size,
        NUM_CHUNKS=num_chunks,
        WITH_SHARES=with_shares,
        KEY_SHIFT=key_shift(logits.dtype),
        BLOCK=min(_CHUNK, max(16, triton.next_power_of_2(vocab_size))),
        num_warps=_NUM_WARPS,
    )
    block_chunks = triton.next_power_of_2(num_chunks)
    _combine_kernel[(num_rows,)](
        values,
        ids,
        sums,
        token_ids,
        shares,
        NUM_CHUNKS=num_chunks,
        WITH_SHARES=with_shares,
        BLOCK_CHUNKS=block_chunks,
        num_warps=1,
    )


@triton.jit
def _race_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    border_keys_ptr,
    border_ids_ptr,
    scales_ptr,
    key_words_ptr,
    values_ptr,
    ids_ptr,
    sums_ptr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    WITH_SHARES: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // NUM_CHUNKS).to(tl.int64)
    ids = (program % NUM_CHUNKS) * BLOCK + tl.arange(0, BLOCK)
    logits = load_tile(logits_ptr + row * row_stride, ids, VOCAB_SIZE)
    low_word = tl.load(key_words_ptr + row * 2).to(tl.uint32, bitcast=True)
    high_word = tl.load(key_words_ptr + row * 2 + 1).to(tl.uint32, bitcast=True)
    scale = tl.load(scales_ptr + row)
    arrivals = -logits
    if scale > 0.0:
        arrivals = log_exponentials(noise_words(ids, low_word, high_word)) - logits * scale
    # A token of the support has a finite arrival, however small its weight.
    arrivals = tl.minimum(arrivals, LARGEST)
    keys = keys_of(logits, KEY_SHIFT)
    kept = in_support(keys, ids, tl.load(border_keys_ptr + row), tl.load(border_ids_ptr + row))
    arrivals = tl.where(kept, arrivals, float("inf"))
    best, winner = chunk_winner(arrivals, ids)
    tl.store(values_ptr + program, best)
    tl.store(ids_ptr + program, winner)
    if WITH_SHARES:
        tl.store(sums_ptr + program, chunk_share(arrivals, best))


@triton.jit
def _combine_kernel(  # type: ignore[no-untyped-def]
    values_ptr,
    ids_ptr,
    sums_ptr,
    token_ids_ptr,
    shares_ptr,
    NUM_CHUNKS: tl.constexpr,
    WITH_SHARES: tl.constexpr,
    BLOCK_CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = row * NUM_CHUNKS
    winner = best_of_chunks(values_ptr + first, ids_ptr + first, NUM_CHUNKS, BLOCK_CHUNKS)
    tl.store(token_ids_ptr + row, winner.to(tl.int64))
    if WITH_SHARES:
        share = winners_share(values_ptr + first, sums_ptr + first, NUM_CHUNKS, BLOCK_CHUNKS)
        tl.store(shares_ptr + row, share)
