"""Arguments and result of an acceptance rule, and the walk that several rules share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.shared.messages import Proposal

LogWeights = NDArray[np.float64]
LawAt = Callable[[int], LogWeights]
ROOT = -1


@dataclass(frozen=True)
class Acceptance:
    """The result of an acceptance rule."""

    accepted_nodes: tuple[int, ...]  # a path down from the root
    final_token: int  # the token after the path (corrected, bonus or target)


def children_of(proposal: Proposal) -> dict[int, list[int]]:
    """Maps each node to its children, in order; ROOT is the committed prefix.

    In a chain each token is the child of the one before it.
    """
    children: dict[int, list[int]] = {}
    parents = proposal.parents or range(-1, len(proposal.token_ids) - 1)
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children


def agreed_path(proposal: Proposal, token_after: Callable[[int, int], int]) -> Acceptance:
    """Goes down as far as the draft has the target's own tokens.

    token_after: the target's token after a node, given the number of nodes accepted so far.
    """
    children = children_of(proposal) if proposal.token_ids else {}
    node = ROOT
    accepted: list[int] = []
    while True:
        token = token_after(node, len(accepted))
        child = next((child for child in children.get(node, ()) if proposal.token_ids[child] == token), None)
        if child is None:
            return Acceptance(tuple(accepted), token)
        node = child
        accepted.append(child)
