"""The race for each session's last token: over its row's residual, and over its target where no residual is left.

One program per vocabulary chunk. Outside the draft law's K tokens the residual is the target times a constant; only the
K tokens inside the chunk are computed one by one.
"""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.sampling_support.triton_noise import log_exponentials, noise_words
from outrider.kernels.sampling_support.triton_race import best_of_chunks, chunk_winner
from outrider.kernels.sampling_support.triton_tiles import (
    LARGEST,
    in_support,
    keys_of,
    load_tile,
    log_weights_of,
    probabilities,
)

CHUNK = 4096  # logits per program


@triton.jit
def residual_race_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    row_stride,
    largest_ptr,
    border_keys_ptr,
    border_ids_ptr,
    masses_ptr,
    scales_ptr,
    final_rows_ptr,
    factors_ptr,
    law_token_ids_ptr,
    law_counts_ptr,
    key_words_ptr,
    values_ptr,
    ids_ptr,
    num_programs,
    LAW_TOTAL: tl.constexpr,
    LAW_WIDTH: tl.constexpr,
    VOCAB_SIZE: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    KEY_SHIFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    session = program // NUM_CHUNKS
    first_id = (program % NUM_CHUNKS) * BLOCK
    ids = first_id + tl.arange(0, BLOCK)
    final_row = tl.load(final_rows_ptr + session)
    factor = tl.load(factors_ptr + session)
    # A session without rows reads row 0 and has no winner.
    row = tl.maximum(final_row, 0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    top = tl.load(largest_ptr + row)
    key = tl.load(border_keys_ptr + row)
    last_id = tl.load(border_ids_ptr + row)
    mass = tl.load(masses_ptr + row)
    scale = tl.load(scales_ptr + row)
    logits = load_tile(row_ptr, ids, VOCAB_SIZE)
    kept = in_support(keys_of(logits, KEY_SHIFT), ids, key, last_id) & (final_row >= 0)
    low_word = tl.load(key_words_ptr + session * 2).to(tl.uint32, bitcast=True)
    high_word = tl.load(key_words_ptr + session * 2 + 1).to(tl.uint32, bitcast=True)
    noise = log_exponentials(noise_words(ids, low_word, high_word))
    target = tl.where(kept, tl.minimum(noise - log_weights_of(logits, top, scale), LARGEST), float("inf"))
    target_best, target_winner = chunk_winner(target, ids)
    best = tl.full([], float("inf"), tl.float32)
    winner = tl.full([], -1, tl.int32)
    if factor > 0.0:
        residual = target - tl.log(factor / mass).to(tl.float32)
        for place in range(LAW_WIDTH):
            count = tl.load(law_counts_ptr + (row + 1) * LAW_WIDTH + place)
            token = tl.load(law_token_ids_ptr + (row + 1) * LAW_WIDTH + place)
            if (count > 0) & (token >= first_id) & (token < first_id + BLOCK):
                target_prob = probabilities(row_ptr, token, VOCAB_SIZE, top, key, last_id, mass, scale, KEY_SHIFT)
                excess = factor * target_prob - count.to(tl.float64) / LAW_TOTAL
                log_excess = tl.log(tl.where(excess > 0.0, excess, 1.0)).to(tl.float32)
                residual = tl.where(ids == token, tl.where(excess > 0.0, noise - log_excess, float("inf")), residual)
        best, winner = chunk_winner(residual, ids)
    tl.store(values_ptr + program, best)
    tl.store(ids_ptr + program, winner)
    tl.store(values_ptr + num_programs + program, target_best)
    tl.store(ids_ptr + num_programs + program, target_winner)


@triton.jit
def combine_kernel(  # type: ignore[no-untyped-def]
    values_ptr, ids_ptr, num_programs, final_tokens_ptr, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr
):
    session = tl.program_id(0)
    first = session * NUM_CHUNKS
    residual = best_of_chunks(values_ptr + first, ids_ptr + first, NUM_CHUNKS, BLOCK_CHUNKS)
    first += num_programs
    target = best_of_chunks(values_ptr + first, ids_ptr + first, NUM_CHUNKS, BLOCK_CHUNKS)
    tl.store(final_tokens_ptr + session, tl.where(residual >= 0, residual, target).to(tl.int64))
