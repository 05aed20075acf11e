"""Rejection mode for chains with laws, decided for the block as a whole (Sun et al. 2024, Block Verification).

With P_0 = 1 and P_i = min(1, P_(i-1) * target_i[x_i] / draft_i[x_i]):

    S_i = sum over x of max(P_i * target_(i+1)[x] - draft_(i+1)[x], 0)
    h_i = S_i / (S_i + 1 - P_i) for i < n (0/0 is 1),  h_n = P_n
    tau = the largest i with u_i < h_i, u_i independent uniforms; a failure does not end the search
    next token: from target_(n+1) if tau = n, else from norm(max(P_tau * target_(tau+1) - draft_(tau+1), 0))

Never accepts fewer tokens in expectation than `standard`, and 5-8 % more in practice. Needs every row's law, but for
those after a token that the target excludes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.sampling import draw, probabilities
from shared.messages import Proposal
from verifier_service.acceptance.outcome import Acceptance, LawAt
from verifier_service.acceptance.standard import dense_law


def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    num_draft_tokens = len(proposal.token_ids)
    joint = 1.0  # P_i
    # Place 0 always holds (P_0 = 1 makes h_0 = 1), so something is always chosen.
    tau = 0
    residual: NDArray[np.float64] | None = None
    for place in range(num_draft_tokens + 1):
        target_probs = probabilities(law_at(place - 1))
        if place == num_draft_tokens:
            if rng.random() < joint:
                tau, residual = place, target_probs
            break
        draft_probs = dense_law(proposal.laws[place], len(target_probs))
        excess = np.maximum(joint * target_probs - draft_probs, 0.0)
        mass = float(excess.sum())
        # In this order: (mass + 1) - joint rounds mass away, and place 0 was then refused now and then.
        weight = mass + (1.0 - joint)
        if weight <= 0.0 or rng.random() < mass / weight:
            # No excess is left only when both laws are equal, up to rounding: the target itself is the residual.
            tau, residual = place, excess if mass > 0.0 else target_probs
        token = proposal.token_ids[place]
        joint = min(1.0, joint * float(target_probs[token]) / float(draft_probs[token]))
        if joint <= 0.0:
            break  # no later place can hold, and after an impossible token a grammar may have no law to ask for
    if residual is None:
        raise ArithmeticError("place 0 of a block was refused: the target's law holds no mass")
    return Acceptance(tuple(range(tau)), draw(residual, rng))
