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
from outrider.verifier_service.acceptance.outcome import ROOT, Acceptance, LawAt, children_of


def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    children = children_of(proposal)
    node = ROOT
    accepted: list[int] = []
    while True:
        token = draw(probabilities(law_at(node)), rng)
        child = next((child for child in children.get(node, ()) if proposal.token_ids[child] == token), None)
        if child is None:
            return Acceptance(tuple(accepted), token)
        node = child
        accepted.append(child)
