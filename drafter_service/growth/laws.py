"""The law a draft token is drawn from in rejection mode: integer counts over the likeliest tokens.

The drafter samples from exactly these counts, and they are what it sends: no rounding on either side.
"""

from __future__ import annotations

import numpy as np

from engine.ranking import likeliest
from engine.sampling import LogWeights, probabilities
from shared.messages import LAW_SIZE, LAW_TOTAL, SparseLaw


def sparse_law(log_weights: LogWeights) -> SparseLaw:
    """The LAW_SIZE likeliest tokens, in integer counts that sum to LAW_TOTAL, likeliest first; of a row that holds no
    number, nothing."""
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
    """Up to `count` different tokens, one after another without replacement, in the order drawn."""
    counts = np.array(law.counts, dtype=np.int64)
    drawn: list[int] = []
    for _ in range(min(count, len(counts))):
        place = int(np.searchsorted(np.cumsum(counts), rng.integers(counts.sum()), side="right"))
        drawn.append(law.token_ids[place])
        counts[place] = 0
    return drawn


def propose_rng(stream_key: int, epoch: int, base_len: int) -> np.random.Generator:
    """Randomness of one proposal in rejection mode; no other stream shares it.

    A generator per session would start anew when the session is opened again (another drafter took over), and its
    drafts would then depend on the tokens that the same numbers have led to already: no longer the target's law.
    """
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([stream_key, epoch, base_len, 0xD4AF7])))
