"""Rejection mode for trees with laws: recursive rejection without replacement (Jeon et al. 2024, RRS).

At a node with target law and draft law, the children were drawn from the draft law one after another without
replacement. Each is tried in turn: if u * draft_probs[x] < target_probs[x] go down to it; else BOTH laws change, with
the current draft law: target <- norm(max(target - draft, 0)), draft[x] <- 0, draft <- norm(draft). When no child is
left the next token comes from what the target law has become.
"""

from __future__ import annotations

import numpy as np

from engine.sampling import draw, probabilities
from shared.messages import Proposal
from verifier_service.acceptance.outcome import ROOT, Acceptance, LawAt, children_of
from verifier_service.acceptance.standard import dense_law


def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    """`proposal.laws[child]` is the law at the child's parent; siblings stand in the order they were drawn in."""
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
            # Equal laws, up to rounding, leave no residual; a token of them is never refused but by rounding.
            target_probs = residual / residual.sum() if residual.any() else target_probs
            draft_probs[token] = 0.0
            if not draft_probs.any():
                break
            draft_probs /= draft_probs.sum()
        if chosen is None:
            return Acceptance(tuple(accepted), draw(target_probs, rng))
        node = chosen
        accepted.append(chosen)
