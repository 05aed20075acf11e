"""Rejection mode for drafts without a law (n-gram, suffix, greedy trees): each draft token is a point mass.

At a node, draw y from the target's law and go down if y is one of the node's children; else y is the next token. For
a chain this is the same law as "accept x with probability target_probs[x], else draw from the rest": P(accept x) =
target_probs[x], and given a rejection y follows target_probs without x, renormalized (Leviathan et al. 2023 with a
one-hot draft law; the tree form is SpecInfer's naive sampling, Miao et al. 2023).
"""

from __future__ import annotations

import numpy as np

from engine.sampling import draw, probabilities
from shared.messages import Proposal
from verifier_service.acceptance.outcome import ROOT, Acceptance, LawAt, children_of


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
