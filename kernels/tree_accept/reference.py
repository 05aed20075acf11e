"""tree_accept in plain Python: the oracle; follows verifier_service/acceptance/coupled.py."""

from __future__ import annotations

import torch


def tree_accept(
    sampled_tokens: torch.Tensor,
    row_starts: torch.Tensor,
    parents: torch.Tensor,
    draft_tokens: torch.Tensor,
    max_nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See kernels/tree_accept/triton.py."""
    num_sessions = len(row_starts) - 1
    accepted_nodes = torch.full((num_sessions, max_nodes), -1, dtype=torch.int32)
    num_accepted = torch.zeros(num_sessions, dtype=torch.int32)
    final_tokens = torch.full((num_sessions,), -1, dtype=torch.int64)
    sampled, parent_of, drafted = sampled_tokens.tolist(), parents.tolist(), draft_tokens.tolist()
    for session, (start, end) in enumerate(zip(row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True)):
        path: list[int] = []
        node: int | None = -1 if end > start else None
        while node is not None:
            token = sampled[start + 1 + node]
            final_tokens[session] = token
            rows = range(start + 1, end)
            hits = (row - start - 1 for row in rows if parent_of[row] == node and drafted[row] == token)
            node = next(hits, None)
            if node is not None:
                path.append(node)
        accepted_nodes[session, : len(path)] = torch.tensor(path, dtype=torch.int32)
        num_accepted[session] = len(path)
    device = sampled_tokens.device
    return accepted_nodes.to(device), num_accepted.to(device), final_tokens.to(device)
