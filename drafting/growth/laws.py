"""The distribution of draft tokens in rejection mode: integer counts over the likeliest tokens.

The drafter samples from exactly the counts that it sends, so nothing is rounded on either side.
"""

from __future__ import annotations

import numpy as np

from outrider.engine.sampling.laws import LogWeights, probabilities
from outrider.engine.sampling.ranking import likeliest
from outrider.shared.messages import LAW_SIZE, LAW_TOTAL, SparseLaw


def sparse_law(log_weights: LogWeights) -> SparseLaw:
    """Returns the LAW_SIZE likeliest tokens, likeliest first, with integer counts that sum to LAW_TOTAL.

    The law is empty for a row of NaNs.
    """
    token_ids = likeliest(log_weights, LAW_SIZE)
    if not len(token_ids):
        return SparseLaw((), ())
    probs = probabilities(log_weights)
    shares = probs[token_ids] / probs[token_ids].sum() * LAW_TOTAL
    counts = np.floor(shares).astype(np.int64)
    counts[0] += LAW_TOTAL - counts.sum()
    kept = counts > 0
    return SparseLaw(tuple(token_ids[kept].tolist()), tuple(counts[kept].tolist()))


def draw_distinct(law: SparseLaw, count: int, rng: np.random.Generator) -> list[int]:
    """Samples up to `count` different tokens without replacement, in the order drawn."""
    counts = np.array(law.counts, dtype=np.int64)
    drawn: list[int] = []
    for _ in range(min(count, len(counts))):
        index = int(np.searchsorted(np.cumsum(counts), rng.integers(counts.sum()), side="right"))
        drawn.append(law.token_ids[index])
        counts[index] = 0
    return drawn


def propose_rng(stream_key: int, epoch: int, base_len: int) -> np.random.Generator:
    """Returns the randomness of one proposal in rejection mode, not shared with any other stream.

    A generator per session would repeat its numbers when the session reopens at another drafter. Drafts would then
    depend on tokens that the same numbers produced, and the output would not follow the target's distribution.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([stream_key, epoch, base_len, 0xD4AF7])))
