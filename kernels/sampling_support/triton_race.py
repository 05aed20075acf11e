"""Device functions: the winner of a race, first among a chunk's tokens, then among the chunks. Both are exact."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_winner(arrivals, ids):  # type: ignore[no-untyped-def]
    """The smallest float32 arrival and the smallest id that has it; +inf means not in the race, and -1 that none is."""
    best = tl.min(arrivals, axis=0)
    winner = tl.min(tl.where(arrivals == best, ids, 0x7FFFFFFF), axis=0)
    return best, tl.where(best < float("inf"), winner, -1)


@triton.jit
def best_of_chunks(values_ptr, ids_ptr, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr):  # type: ignore[no-untyped-def]
    """int32: the winner among the chunks of one row, -1 if no chunk has one."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    values = tl.load(values_ptr + chunks, mask=chunks < NUM_CHUNKS, other=float("inf"))
    ids = tl.load(ids_ptr + chunks, mask=chunks < NUM_CHUNKS, other=-1)
    _, winner = chunk_winner(values, ids)
    return winner
