"""How far a draft's law is from the target's at counted positions: the loss to train on, and what will be accepted.

Not here: which positions and which weights (the methods). Soft targets: the target's whole law at a position costs
nothing more once its logits are there, and says more than the one token that was drawn from it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from training.heads.interface import DraftScores

# Depths count less the deeper they are: they are reached only when all before were accepted (Medusa, EAGLE-3).
DEPTH_DECAY = 0.8
# Estimates over all positions took 15% of an EAGLE-3 step (vocabulary 4,096, 2,048 tokens, CPU); this many are enough
# for a progress line. Held-out figures count every position.
NUM_SCORED = 256


def soft_cross_entropy(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, target_ids: torch.Tensor | None = None
) -> torch.Tensor:
    """float32[N]: -sum over j of target(j) log draft(j), for logits [N, draft vocab] and [N, vocab].

    With a reduced draft vocabulary (`target_ids` int64[draft vocab]) the target's law is left as it is, not
    renormalized: a position counts by the mass that the draft could ever match.
    """
    target_probs = torch.softmax(target_logits.float(), dim=-1)
    if target_ids is not None:
        target_probs = target_probs[:, target_ids]
    return -(target_probs * torch.log_softmax(draft_logits.float(), dim=-1)).sum(-1)


@torch.no_grad()
def acceptance_sums(
    draft_logits: torch.Tensor, target_logits: torch.Tensor, target_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(argmaxes that agree, summed overlap), each float32[], over logits [N, draft vocab] and [N, vocab]."""
    draft_probs = torch.softmax(draft_logits.float(), dim=-1)
    target_probs = torch.softmax(target_logits.float(), dim=-1)
    picked = draft_probs.argmax(-1)
    if target_ids is not None:
        picked = target_ids[picked]
        reachable = target_probs[:, target_ids]
    else:
        reachable = target_probs
    agreement = (picked == target_probs.argmax(-1)).sum().float()
    return agreement, torch.minimum(draft_probs, reachable).sum()


class DepthLosses:
    """Adds up one method's losses over depths: `add` once per depth, then `total` and `scores`.

    `is_training`: estimates are taken on at most NUM_SCORED positions per depth, evenly spread.
    """

    def __init__(self, is_training: bool, target_ids: torch.Tensor | None = None) -> None:
        self._is_training, self._target_ids = is_training, target_ids
        self._losses: list[torch.Tensor] = []
        self._scores: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(
        self,
        draft_logits: torch.Tensor,
        target_logits: torch.Tensor,
        weight: float,
        labels: torch.Tensor | None = None,
    ) -> None:
        """One depth at its counted positions: logits [N, draft vocab] and [N, vocab]; N may be 0.

        With `labels` int64[N] the loss is the cross-entropy of these tokens (draft ids) instead of the target's law.
        """
        if labels is None:
            losses = soft_cross_entropy(draft_logits, target_logits, self._target_ids)
        else:
            losses = F.cross_entropy(draft_logits.float(), labels, reduction="none")
        self._losses.append(weight * losses.sum() / max(1, len(losses)))
        stride = -(-len(losses) // NUM_SCORED) if self._is_training and len(losses) else 1
        scored = draft_logits.detach()[::stride]
        agreement, overlap = acceptance_sums(scored, target_logits[::stride], self._target_ids)
        self._scores.append((agreement, overlap, torch.tensor(float(len(scored)), device=agreement.device)))

    def add_term(self, term: torch.Tensor) -> None:
        """A further scalar of the loss."""
        self._losses.append(term)

    def total(self) -> torch.Tensor:
        """Scalar: the weighted sum over depths of the mean over positions."""
        return torch.stack(self._losses).sum()

    def scores(self) -> DraftScores:
        agreement, overlap, counts = (torch.stack(column) for column in zip(*self._scores, strict=True))
        return DraftScores(agreement, overlap, counts)


def counted_at(counts: torch.Tensor, depth_offset: int, num_positions: int) -> torch.Tensor:
    """bool[B, num_positions]: whether the token `depth_offset` after position t is counted; false beyond the row."""
    shifted = counts[:, depth_offset : depth_offset + num_positions]
    return F.pad(shifted, (0, num_positions - shifted.shape[1]), value=False)


def shifted_rows(values: torch.Tensor, offset: int, where: torch.Tensor) -> torch.Tensor:
    """The rows values[b, t + offset] at the true (b, t) of `where` bool[B, N]: [count, ...], in row-major order."""
    batch_index, position = where.nonzero(as_tuple=True)
    return values[batch_index, position + offset]
