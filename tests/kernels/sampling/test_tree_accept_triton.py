"""The walk down a draft tree: against the reference, the verifier's own rule, and cases by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.tree_accept import reference
from outrider.kernels.tree_accept.triton import tree_accept
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance import coupled
from tests.kernels.triton_device import device

VOCAB = 2


def random_forest(sizes: list[int], seed: int) -> tuple[torch.Tensor, ...]:
    """sampled_tokens, row_starts, parents, draft_tokens; a few tokens only, so that walks go deep."""
    generator = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(sizes)])
    num_rows = int(starts[-1])
    parents = np.full(num_rows, -7)
    for start, size in zip(starts, sizes, strict=False):
        for node in range(size - 1):
            # Chains and bushes: mostly below the last node.
            parents[start + 1 + node] = node - 1 if generator.random() < 0.6 else generator.integers(-1, node)
    sampled, drafted = generator.integers(0, VOCAB, (2, num_rows))
    return (
        torch.tensor(sampled, dtype=torch.int64, device=device()),
        torch.tensor(starts, dtype=torch.int32, device=device()),
        torch.tensor(parents, dtype=torch.int32, device=device()),
        torch.tensor(drafted, dtype=torch.int64, device=device()),
    )


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_reference(seed: int) -> None:
    sizes = [1, 12, 0, 40, 2, 7, 0, 33, 5]
    sampled, starts, parents, drafted = random_forest(sizes, seed)
    mine = tree_accept(sampled, starts, parents, drafted, 40)
    expected = reference.tree_accept(sampled, starts, parents, drafted, 40)
    for left, right in zip(mine, expected, strict=True):
        assert left.dtype == right.dtype
        assert torch.equal(left, right)
    assert mine[1].sum() >= 3
    assert mine[2][2] == -1


def test_is_the_verifiers_rule() -> None:
    for seed in range(10):
        sampled, starts, parents, drafted = random_forest([20], seed)
        proposal = Proposal(0, tuple(drafted[1:].tolist()), "", parents=tuple(parents[1:].tolist()))

        def law_at(node: int, sampled: torch.Tensor = sampled) -> np.ndarray:
            law = np.full(VOCAB, -np.inf)
            law[int(sampled[1 + node])] = 0.0
            return law

        expected = coupled.accept(law_at, proposal, stream_key=0)
        nodes, num_accepted, final_token = tree_accept(sampled, starts, parents, drafted, 19)
        assert tuple(nodes[0, : int(num_accepted)].tolist()) == expected.accepted_nodes
        assert int(final_token) == expected.final_token


def test_a_chain_ends_at_the_first_difference_and_pads_with_minus_one() -> None:
    ints = {"dtype": torch.int64, "device": device()}
    sampled = torch.tensor([4, 5, 9, 7], **ints)
    drafted = torch.tensor([0, 4, 5, 6], **ints)
    starts, parents = (torch.tensor(v, dtype=torch.int32, device=device()) for v in ([0, 4], [-9, -1, 0, 1]))
    nodes, num_accepted, final_token = tree_accept(sampled, starts, parents, drafted, 5)
    assert (nodes.tolist(), num_accepted.tolist(), final_token.tolist()) == ([[0, 1, -1, -1, -1]], [2], [9])
    sampled[2] = 6
    nodes, num_accepted, final_token = tree_accept(sampled, starts, parents, drafted, 5)
    assert (nodes.tolist(), num_accepted.tolist(), final_token.tolist()) == ([[0, 1, 2, -1, -1]], [3], [7])


def test_wrong_dtype_is_refused() -> None:
    sampled, starts, parents, drafted = random_forest([3], 0)
    with pytest.raises(KernelArgumentError, match="parents"):
        tree_accept(sampled, starts, parents.to(torch.int64), drafted, 2)
