"""rejection_sample in plain float64 torch, session by session: the oracle, not for serving.

Follows verifier_service/acceptance/{standard,block}.py, with given randomness.
"""

from __future__ import annotations

import torch

from outrider.kernels.coupled_sample.noise import exponentials
from outrider.kernels.rejection_sample.drafts import ChainDrafts
from outrider.kernels.sampling_support.reference import log_weights
from outrider.kernels.sampling_support.transforms import Transforms


def rejection_sample(
    logits: torch.Tensor, transforms: Transforms, drafts: ChainDrafts, uniforms: torch.Tensor, key_words: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See kernels/rejection_sample/triton.py."""
    target_probs = torch.softmax(log_weights(logits, transforms), dim=1)
    draft_probs = _dense_laws(drafts, logits.shape[1])
    num_accepted, final_tokens = [], []
    for session in range(drafts.num_sessions):
        rows = slice(int(drafts.row_starts[session]), int(drafts.row_starts[session + 1]))
        if rows.start == rows.stop:
            num_accepted.append(0)
            final_tokens.append(-1)
            continue
        rule = _block if drafts.block_rules[session] else _standard
        tau, residual = rule(target_probs[rows], draft_probs[rows][1:], drafts.token_ids[rows][1:], uniforms[rows])
        num_accepted.append(tau)
        final_tokens.append(_race(residual, key_words[session]))
    return (
        torch.tensor(num_accepted, dtype=torch.int32, device=logits.device),
        torch.tensor(final_tokens, dtype=torch.int64, device=logits.device),
    )


def _standard(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token_ids: torch.Tensor, uniforms: torch.Tensor
) -> tuple[int, torch.Tensor]:
    for place, token in enumerate(token_ids.tolist()):
        if uniforms[place] * draft_probs[place, token] >= target_probs[place, token]:
            residual = torch.clamp(target_probs[place] - draft_probs[place], min=0.0)
            return place, residual if residual.any() else target_probs[place]
    return len(token_ids), target_probs[-1]


def _block(
    target_probs: torch.Tensor, draft_probs: torch.Tensor, token_ids: torch.Tensor, uniforms: torch.Tensor
) -> tuple[int, torch.Tensor]:
    joint, tau, residual = 1.0, 0, target_probs[0]
    for place, token in enumerate(token_ids.tolist()):
        excess = torch.clamp(joint * target_probs[place] - draft_probs[place], min=0.0)
        mass = float(excess.sum())
        weight = mass + (1.0 - joint)
        if weight <= 0.0 or uniforms[place] < mass / weight:
            tau, residual = place, excess if mass > 0.0 else target_probs[place]
        joint = min(1.0, joint * float(target_probs[place, token]) / float(draft_probs[place, token]))
        if joint <= 0.0:
            return tau, residual
    if uniforms[len(token_ids)] < joint:
        return len(token_ids), target_probs[-1]
    return tau, residual


def _dense_laws(drafts: ChainDrafts, vocab_size: int) -> torch.Tensor:
    probs = torch.zeros(len(drafts.token_ids), vocab_size, dtype=torch.float64, device=drafts.token_ids.device)
    counts = drafts.law_counts.to(torch.float64) / drafts.law_total
    return probs.scatter_add_(1, drafts.law_token_ids.to(torch.int64), counts)


def _race(weights: torch.Tensor, key_words: torch.Tensor) -> int:
    token_ids = torch.arange(len(weights), device=weights.device)
    arrivals = torch.log(exponentials(token_ids, key_words[None])[0]) - torch.log(weights)
    return int(torch.argmin(arrivals))
