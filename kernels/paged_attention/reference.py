"""Attention over a paged cache, one query row at a time, in fp64 and plain torch, on any device.

Not a fast path: it is the oracle of the tests and the plainest statement of what the kernels compute.
Its bits are not those of the kernels (they compute in fp32, in tiles); it agrees within rounding.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from kernels.errors import KernelArgumentError


def visible_cache_indices(
    row: int, context_len: int, tree_start: int, parents: list[int], sliding_window: int | None
) -> list[int]:
    """Cache indices that a row of one session sees, in logical order, itself last.

    row and parents are relative to the session's first row. A tree row (row >= tree_start) sees everything
    before the tree, then its ancestors in the tree, then itself; the i-th of them stands at logical position
    i, whatever its cache index. A sliding window keeps the last `sliding_window` logical positions.
    """
    path: list[int] = []
    node = row
    while node >= tree_start:
        path.append(context_len + node)
        if parents[node] >= node:
            raise KernelArgumentError(f"row {node} of a tree stands below row {parents[node]}")
        node = parents[node]
    num_shared = context_len + (tree_start if path else row + 1)
    indices = list(range(num_shared)) + path[::-1]
    return indices if sliding_window is None else indices[-sliding_window:]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    query_starts: torch.Tensor,
    tree_starts: torch.Tensor,
    parents: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend query [T, Hq, D] to its cached context; returns [T, Hq, Dv] in the dtype of query.

    key_cache [num_blocks, Hkv, block_size, D] and value_cache [..., Dv] already hold the rows of this call:
    row i of session s at cache index context_lens[s] + i, i.e. in block block_tables[s, index // block_size].
    block_tables int32 [S, B]; context_lens and tree_starts int32 [S]; query_starts int32 [S+1]; parents int32
    [T]; sinks [Hq]: one more logit per head in the softmax denominator (as in gpt-oss).
    """
    num_kv_heads, block_size = key_cache.shape[1], key_cache.shape[2]
    out = query.new_zeros((query.shape[0], query.shape[1], value_cache.shape[3]))
    starts, contexts, trees = query_starts.tolist(), context_lens.tolist(), tree_starts.tolist()
    for session, (first, last) in enumerate(pairwise(starts)):
        session_parents = parents[first:last].tolist()
        for row in range(last - first):
            visible = visible_cache_indices(row, contexts[session], trees[session], session_parents, sliding_window)
            indices = torch.tensor(visible, device=query.device)
            block_ids = block_tables[session, indices // block_size].long()
            offsets = indices % block_size
            out[first + row] = _attend_row(
                query[first + row].double().view(num_kv_heads, -1, query.shape[2]),
                key_cache[block_ids, :, offsets].double(),
                value_cache[block_ids, :, offsets].double(),
                scaling,
                softcap,
                sinks,
            ).to(query.dtype)
    return out


def _attend_row(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """query [Hkv, group, D], keys [L, Hkv, D], values [L, Hkv, Dv]; returns [Hkv * group, Dv], all fp64."""
    scores = torch.einsum("hgd,lhd->hgl", query, keys) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if sinks is not None:
        sink_scores = sinks.double().view(scores.shape[0], scores.shape[1], 1)
        probs = torch.softmax(torch.cat([scores, sink_scores], dim=-1), dim=-1)[..., :-1]
    else:
        probs = torch.softmax(scores, dim=-1)
    return torch.einsum("hgl,lhd->hgd", probs, values).flatten(0, 1)
