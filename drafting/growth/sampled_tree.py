"""The shape of a tree of sampled tokens: the number of children at each position, fixed before sampling.

In rejection mode dropping a sampled node because of its token would bias the output, so the shape may not depend on the
tokens. It has the nodes most likely to be reached, as Medusa's static trees (Cai et al. 2024, section 2.3.3), assuming
a constant chance that the k-th draw at a position is accepted.
"""

from __future__ import annotations

import functools
import heapq
from collections import Counter
from collections.abc import Mapping

# probability that the k-th draw at a position is accepted; measured on the demo family at temperature 1, EAGLE and
# draft model alike: 0.57 for the first draw, 0.09 for the next five together
ACCEPTED_SHARES = (0.6, 0.06, 0.03, 0.015)

# A position as the ranks of the draws leading to it: () is the root, (0, 1) the second child of the first child.
Ranks = tuple[int, ...]


@functools.cache
def sampled_shape(max_nodes: int, max_depth: int, max_branches: int, beam_width: int) -> Mapping[Ranks, int]:
    """Returns the number of children of each inner position; at most `beam_width` such positions per depth."""
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
