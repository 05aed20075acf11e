"""Device functions: the exact winner of a race, in a chunk and among chunks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def chunk_winner(arrivals, ids):  # type: ignore[no-untyped-def]
    """The smallest float32 arrival and the smallest id that has it; +inf: not in the race; id -1: no token is."""
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


@triton.jit
def chunk_share(arrivals, best):  # type: ignore[no-untyped-def]
    """float32: the chunk's sum of 1 / arrival, relative to its winner's; 0 without one. arrivals: logarithms."""
    races = best < float("inf")
    differences = tl.where(races, best, 0.0) - arrivals
    return tl.where(races, tl.sum(tl.exp(differences), axis=0), 0.0)


@triton.jit
def winners_share(  # type: ignore[no-untyped-def]
    values_ptr, sums_ptr, NUM_CHUNKS: tl.constexpr, BLOCK_CHUNKS: tl.constexpr
):
    """float32: the row winner's share of all chunks' sums; 0 if no chunk has a winner."""
    chunks = tl.arange(0, BLOCK_CHUNKS)
    values = tl.load(values_ptr + chunks, mask=chunks < NUM_CHUNKS, other=float("inf"))
    sums = tl.load(sums_ptr + chunks, mask=chunks < NUM_CHUNKS, other=0.0)
    best = tl.min(values, axis=0)
    races = best < float("inf")
    total = tl.sum(tl.exp(tl.where(races, best, 0.0) - values) * sums, axis=0)
    return tl.where(races, 1.0 / tl.where(races, total, 1.0), 0.0)
