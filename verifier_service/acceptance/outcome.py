"""Arguments and result of an acceptance rule."""

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
