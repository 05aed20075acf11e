"""The shape of a tree whose tokens are drawn: which places have how many children, settled before anything is drawn.

In rejection mode a drawn node must not be dropped for what was drawn, so the shape may not depend on the tokens. It is
that of the nodes most likely to be reached, as Medusa's static trees are (Cai et al. 2024, section 2.3.3), with the
chance that a place's k-th draw is the accepted one taken as a constant.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Mapping

# Measured on the demo family at temperature 1, EAGLE and draft model alike: the first draw is accepted at 0.57, any of
# five further ones at 0.09 together. What a law has left once its own draw was refused is seldom what the target has.
ACCEPTED_SHARES = (0.6, 0.06, 0.03, 0.015)

# A place by the ranks of the draws that lead to it: () is the root, (0, 1) the second child of the first child.
Ranks = tuple[int, ...]


@functools.cache
def sampled_shape(max_nodes: int, max_depth: int, max_branches: int, beam_width: int) -> Mapping[Ranks, int]:
    """How many children each place has that has any; at most `beam_width` such places stand at one depth."""
    num_children: Counter[Ranks] = Counter()
    places_at: Counter[int] = Counter()
    offers: list[tuple[float, Ranks]] = [(-ACCEPTED_SHARES[0], (0,))] if max_nodes > 0 and max_depth > 0 else []
    while offers and num_children.total() < max_nodes:
        negative_reach, ranks = heapq.heappop(offers)
        parent, rank = ranks[:-1], ranks[-1]
        if parent not in num_children:
            if places_at[len(parent)] == beam_width:
                continue
            places_at[len(parent)] += 1
        num_children[parent] += 1
        if rank + 1 < min(max_branches, len(ACCEPTED_SHARES)):
            sibling = negative_reach / ACCEPTED_SHARES[rank] * ACCEPTED_SHARES[rank + 1]
            heapq.heappush(offers, (sibling, (*parent, rank + 1)))
        if len(ranks) < max_depth:
            heapq.heappush(offers, (negative_reach * ACCEPTED_SHARES[0], (*ranks, 0)))
    return num_children
