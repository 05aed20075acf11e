"""Walks down each session's draft tree while the drafted tokens equal the target's samples; a chain is a tree.

Used by exact mode (acceptance/coupled.py) with the tokens of coupled_sample, and by rejection mode with point masses
(acceptance/point_mass.py) with tokens sampled by keys from the session's generator. One program per session, all its
nodes in one tile.

Not here: trees with draft laws (acceptance/tree.py, on the host), chains with draft laws (kernels/rejection_sample).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.sampling_support.transforms import check_vector


def tree_accept(
    sampled_tokens: torch.Tensor,
    row_starts: torch.Tensor,
    parents: torch.Tensor,
    draft_tokens: torch.Tensor,
    max_nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accepted nodes int32 [S, max_nodes] (from the root, then -1), their number int32 [S], and the token after them
    int64 [S]; a session without rows: 0 nodes and -1.

    row_starts int32 [S + 1]: session s owns the rows [row_starts[s], row_starts[s + 1]): its root, then nodes 0, 1, ...
    sampled_tokens int64 [N]: the target's token after each row. draft_tokens int64 [N]: the node's token. parents
    int32 [N]: a smaller node, or -1 for the root. (The last two are not read in root rows.) max_nodes: at least the
    largest tree's size; later nodes are never accepted. Of equal siblings the first is taken. Raises
    KernelArgumentError.
    """
    num_sessions, num_rows = row_starts.shape[0] - 1, sampled_tokens.shape[0]
    check_vector("row_starts", row_starts, torch.int32, (num_sessions + 1,))
    check_vector("sampled_tokens", sampled_tokens, torch.int64, (num_rows,))
    check_vector("parents", parents, torch.int32, (num_rows,))
    check_vector("draft_tokens", draft_tokens, torch.int64, (num_rows,))
    if max_nodes < 0:
        raise KernelArgumentError(f"max_nodes must not be negative, not {max_nodes}")
    device = sampled_tokens.device
    accepted_nodes = torch.empty(num_sessions, max_nodes, dtype=torch.int32, device=device)
    num_accepted = torch.empty(num_sessions, dtype=torch.int32, device=device)
    final_tokens = torch.empty(num_sessions, dtype=torch.int64, device=device)
    if num_sessions:
        _tree_accept_kernel[(num_sessions,)](
            sampled_tokens,
            row_starts,
            parents,
            draft_tokens,
            accepted_nodes,
            num_accepted,
            final_tokens,
            MAX_NODES=max_nodes,
            BLOCK_NODES=max(32, triton.next_power_of_2(max_nodes)),
            num_warps=1,
        )
    return accepted_nodes, num_accepted, final_tokens


@triton.jit
def _tree_accept_kernel(  # type: ignore[no-untyped-def]
    sampled_tokens_ptr,
    row_starts_ptr,
    parents_ptr,
    draft_tokens_ptr,
    accepted_nodes_ptr,
    num_accepted_ptr,
    final_tokens_ptr,
    MAX_NODES: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    session = tl.program_id(0)
    root_row = tl.load(row_starts_ptr + session)
    num_rows = tl.load(row_starts_ptr + session + 1) - root_row
    nodes = tl.arange(0, BLOCK_NODES)
    known = (nodes < num_rows - 1) & (nodes < MAX_NODES)
    parents = tl.load(parents_ptr + root_row + 1 + nodes, mask=known, other=-2)
    draft_tokens = tl.load(draft_tokens_ptr + root_row + 1 + nodes, mask=known, other=-1)
    path = tl.full([BLOCK_NODES], -1, tl.int32)
    num_accepted = tl.full([], 0, tl.int32)
    token = tl.full([], -1, tl.int64)
    node = tl.full([], -1, tl.int32)
    walks = num_rows > 0
    while walks:
        token = tl.load(sampled_tokens_ptr + root_row + 1 + node)
        # Only later nodes are children, so the walk ends for any `parents`.
        fits = known & (parents == node) & (nodes > node) & (draft_tokens == token)
        node = tl.min(tl.where(fits, nodes, BLOCK_NODES), axis=0)
        walks = node < BLOCK_NODES
        path = tl.where(walks & (nodes == num_accepted), node, path)
        num_accepted += walks.to(tl.int32)
    tl.store(accepted_nodes_ptr + session.to(tl.int64) * MAX_NODES + nodes, path, mask=nodes < MAX_NODES)
    tl.store(num_accepted_ptr + session, num_accepted)
    tl.store(final_tokens_ptr + session, token)
