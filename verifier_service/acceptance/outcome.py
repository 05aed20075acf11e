"""What an acceptance rule returns, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from shared.messages import Proposal

LogWeights = NDArray[np.float64]
LawAt = Callable[[int], LogWeights]
ROOT = -1


@dataclass(frozen=True)
class Acceptance:
    """`accepted_nodes` is a path from the root down; `final_token` follows it (corrected, bonus or plain)."""

    accepted_nodes: tuple[int, ...]
    final_token: int


def children_of(proposal: Proposal) -> dict[int, list[int]]:
    """Node -> its children, in order; ROOT is the committed prefix. A chain hangs each token below the last."""
    children: dict[int, list[int]] = {}
    parents = proposal.parents or range(-1, len(proposal.token_ids) - 1)
    for node, parent in enumerate(parents):
        children.setdefault(parent, []).append(node)
    return children
