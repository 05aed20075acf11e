"""Rejection mode for trees with laws: recursive rejection without replacement (Jeon et al. 2024, RRS).

A node has a target law and a draft law; its children were drawn from the draft law, in order, without replacement.
Each child x is tried in turn. If u * draft_probs[x] < target_probs[x], go down to it. Else both laws change, by the
current draft law: target <- norm(max(target - draft, 0)), draft[x] <- 0, draft <- norm(draft). If no child is accepted,
the next token is drawn from the target law as it then is.
"""

from __future__ import annotations

import numpy as np

from outrider.engine.sampling.laws import draw, probabilities
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance.outcome import ROOT, Acceptance, LawAt, children_of
from outrider.verifier_service.acceptance.standard import dense_law


def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    """Accepts a path of the tree by recursive rejection without replacement.

    proposal.laws[child]: the draft law at the child's parent. Siblings are in the order in which they were drawn.
    """
    children = children_of(proposal)
    node = ROOT
    accepted: list[int] = []
    while True:
        target_probs = probabilities(law_at(node))
        siblings = children.get(node, [])
        draft_probs = dense_law(proposal.laws[siblings[0]], len(target_probs)) if siblings else target_probs
        chosen: int | None = None
        for child in siblings:
            token = proposal.token_ids[child]
            if rng.random() * draft_probs[token] < target_probs[token]:
                chosen = child
                break
            residual = np.maximum(target_probs - draft_probs, 0.0)
            # Equal laws leave no residual; they reject a token by rounding only.
            target_probs = residual / residual.sum() if residual.any() else target_probs
            draft_probs[token] = 0.0
            if not draft_probs.any():
                break
            draft_probs /= draft_probs.sum()
        if chosen is None:
            return Acceptance(tuple(accepted), draw(target_probs, rng))
        node = chosen
        accepted.append(chosen)
