"""Rejection mode for chains with laws, one token after another (Leviathan et al. 2023, algorithm 1; Chen et al. 2023).

Accept draft token x if u * draft_probs[x] < target_probs[x]; at the first rejection draw from
norm(max(target_probs - draft_probs, 0)); if all are accepted, one bonus token from the target.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.laws import draw, probabilities
from outrider.shared.messages import LAW_TOTAL, Proposal, SparseLaw
from outrider.verifier_service.acceptance.outcome import ROOT, Acceptance, LawAt


def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    node = ROOT
    for child, (token, law) in enumerate(zip(proposal.token_ids, proposal.laws, strict=True)):
        target_probs = probabilities(law_at(node))
        draft_probs = dense_law(law, len(target_probs))
        if rng.random() * draft_probs[token] >= target_probs[token]:
            residual = np.maximum(target_probs - draft_probs, 0.0)
            # Without residual mass both laws are equal, up to rounding: the residual is the target itself.
            return Acceptance(tuple(range(child)), draw(residual if residual.any() else target_probs, rng))
        node = child
    return Acceptance(tuple(range(len(proposal.token_ids))), draw(probabilities(law_at(node)), rng))


def dense_law(law: SparseLaw, vocab_size: int) -> NDArray[np.float64]:
    """Returns float64 [V] from the wire's integer counts: exactly the law that the drafter sampled from."""
    probs = np.zeros(vocab_size)
    probs[list(law.token_ids)] = np.asarray(law.counts, dtype=np.float64) / LAW_TOTAL
    return probs
