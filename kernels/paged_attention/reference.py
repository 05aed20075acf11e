"""Attention over a paged cache, row by row, in fp64 and plain torch, on any device: the oracle, not for serving.

The kernels compute in fp32 and in tiles; they agree with this within rounding.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.kv_codes.layout import is_coded
from outrider.kernels.kv_codes.reference import decode
from outrider.kernels.paged_attention.arguments import BatchTables, Scoring


def visible_cache_indices(
    row: int, context_len: int, tree_start: int, parents: list[int], scoring: Scoring
) -> list[int]:
    """Cache indices that a row of one session sees, in logical order, itself last.

    row, parents: relative to the session's first row. A tree row (row >= tree_start) sees everything before the tree,
    its ancestors in the tree, and itself; the i-th of these has logical position i, whatever its cache index. A
    sliding window keeps the last `sliding_window` logical positions, a chunk those from its first on.
    """
    path: list[int] = []
    node = row
    while node >= tree_start:
        path.append(context_len + node)
        if parents[node] >= node:
            raise KernelArgumentError(f"tree row {node}: its parent {parents[node]} is not an earlier row")
        node = parents[node]
    num_shared = context_len + (tree_start if path else row + 1)
    indices = list(range(num_shared)) + path[::-1]
    if scoring.chunk_size is not None:
        return indices[(len(indices) - 1) // scoring.chunk_size * scoring.chunk_size :]
    return indices if scoring.sliding_window is None else indices[-scoring.sliding_window :]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: BatchTables,
    scoring: Scoring,
) -> torch.Tensor:
    """See `arguments.PagedAttention`."""
    block_tables, context_lens, query_starts, tree_starts, parents = tables
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    key_cache, value_cache = (decode(cache) if is_coded(cache) else cache for cache in (key_cache, value_cache))
    out = query.new_zeros((query.shape[0], query.shape[1], value_cache.shape[3]))
    starts, contexts, trees = query_starts.tolist(), context_lens.tolist(), tree_starts.tolist()
    for session, (first, last) in enumerate(pairwise(starts)):
        session_parents = parents[first:last].tolist()
        for row in range(last - first):
            visible = visible_cache_indices(row, contexts[session], trees[session], session_parents, scoring)
            indices = torch.tensor(visible, device=query.device)
            block_ids = block_tables[session, indices // block_size].long()
            offsets = indices % block_size
            out[first + row] = _attend_row(
                query[first + row].double().view(num_kv_heads, -1, query.shape[2]),
                key_cache[block_ids, :, offsets].double(),
                value_cache[block_ids, :, offsets].double(),
                scoring,
            ).to(query.dtype)
    return out


def _attend_row(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scoring: Scoring) -> torch.Tensor:
    """query [Hkv, group, D], keys [L, Hkv, D], values [L, Hkv, Dv]; returns [Hkv * group, Dv], all fp64."""
    scores = torch.einsum("hgd,lhd->hgl", query, keys) * scoring.scaling
    if scoring.softcap is not None:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    if scoring.sinks is not None:
        sink_scores = scoring.sinks.double().view(scores.shape[0], scores.shape[1], 1)
        probs = torch.softmax(torch.cat([scores, sink_scores], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(scores, dim=-1)
    return torch.einsum("hgl,lhd->hgd", probs, values).flatten(0, 1)
