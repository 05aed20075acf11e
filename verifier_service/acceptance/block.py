"""Rejection mode for chains with laws, decided for the whole block (Sun et al. 2024, Block Verification).

With P_0 = 1 and P_i = min(1, P_(i-1) * target_i[x_i] / draft_i[x_i]):

    S_i = sum over x of max(P_i * target_(i+1)[x] - draft_(i+1)[x], 0)
    h_i = S_i / (S_i + 1 - P_i) for i < n (0/0 is 1),  h_n = P_n
    tau = the largest i with u_i < h_i, u_i independent uniforms; a failed test does not end the search
    next token: from target_(n+1) if tau = n, else from norm(max(P_tau * target_(tau+1) - draft_(tau+1), 0))

Accepts at least as many tokens in expectation as `standard`; 5 to 8 % faster in Sun et al. Needs the law of every row
up to the first token that the target excludes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.laws import draw, probabilities
from outrider.shared.messages import Proposal
from outrider.verifier_service.acceptance.outcome import Acceptance, LawAt
from outrider.verifier_service.acceptance.standard import dense_law


def accept(law_at: LawAt, proposal: Proposal, *, rng: np.random.Generator) -> Acceptance:
    num_draft_tokens = len(proposal.token_ids)
    joint = 1.0  # P_i
    # Position 0 always passes its test (P_0 = 1 makes h_0 = 1), so a residual is always chosen.
    tau = 0
    residual: NDArray[np.float64] | None = None
    for position in range(num_draft_tokens + 1):
        target_probs = probabilities(law_at(position - 1))
        if position == num_draft_tokens:
            if rng.random() < joint:
                tau, residual = position, target_probs
            break
        draft_probs = dense_law(proposal.laws[position], len(target_probs))
        excess = np.maximum(joint * target_probs - draft_probs, 0.0)
        mass = float(excess.sum())
        # Order matters: (mass + 1) - joint rounds mass away, which sometimes failed the test at position 0.
        weight = mass + (1.0 - joint)
        if weight <= 0.0 or rng.random() < mass / weight:
            # Without excess both laws are equal, up to rounding: the residual is the target itself.
            tau, residual = position, excess if mass > 0.0 else target_probs
        token = proposal.token_ids[position]
        joint = min(1.0, joint * float(target_probs[token]) / float(draft_probs[token]))
        if joint <= 0.0:
            break  # no later test can pass, and after an impossible token a grammar may have no law
    if residual is None:
        raise ArithmeticError("the test at position 0 of a block failed: the target's law has no mass")
    return Acceptance(tuple(range(tau)), draw(residual, rng))
