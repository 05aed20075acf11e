"""Rejection mode for drafts without a law (n-gram, suffix, greedy trees): each draft token is a point mass.

At a node, draw y from the target's law. If y is one of the node's children, go down to it; else y is the next token.
For a chain this equals Leviathan et al. 2023 with a one-hot draft law: x is accepted with probability target_probs[x],
and after a rejection y follows target_probs without x, renormalized. The tree form is SpecInfer's naive sampling (Miao
et al. 2023).
"""

from __future__ import annotations

import numpy as np

from outrider.engine.sampling.laws import draw, probabilities
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance.outcome import Acceptance, LawAt, agreed_path


def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    return agreed_path(proposal, lambda node, _: draw(probabilities(law_at(node)), rng))
