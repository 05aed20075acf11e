"""Losses and estimates against sums written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from training.heads.scoring import (
    NUM_SCORED,
    DepthLosses,
    acceptance_sums,
    counted_at,
    shifted_rows,
    soft_cross_entropy,
)

RNG = np.random.default_rng(0)
DRAFT_IDS = [1, 2, 5, 6]


def logits(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.normal(0, 2, shape))


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_soft_cross_entropy_and_overlap(draft_ids: list[int] | None) -> None:
    target_logits = logits(50, 8)
    draft_logits = logits(50, 8 if draft_ids is None else 4)
    ids = list(range(8)) if draft_ids is None else draft_ids
    target_probs = softmax(target_logits.numpy(), axis=-1)
    draft_probs, draft_log_probs = (kind(draft_logits.numpy(), axis=-1) for kind in (softmax, log_softmax))
    target_ids = None if draft_ids is None else torch.tensor(draft_ids)
    losses = soft_cross_entropy(draft_logits, target_logits, target_ids)
    assert losses.numpy() == pytest.approx(
        [-sum(target_probs[n, j] * draft_log_probs[n, i] for i, j in enumerate(ids)) for n in range(50)], rel=1e-4
    )
    agreement, overlap = acceptance_sums(draft_logits, target_logits, target_ids)
    assert float(overlap) == pytest.approx(
        sum(min(target_probs[n, j], draft_probs[n, i]) for n in range(50) for i, j in enumerate(ids)), rel=1e-4
    )
    picked = [ids[index] for index in draft_probs.argmax(-1)]
    assert int(agreement) == int((target_probs.argmax(-1) == picked).sum())
    assert 0 < int(agreement) < 50


def test_the_loss_is_least_where_the_laws_are_one() -> None:
    target_logits = logits(20, 8)
    same = soft_cross_entropy(target_logits, target_logits)
    assert (same <= soft_cross_entropy(logits(20, 8), target_logits)).all()
    entropies = torch.distributions.Categorical(logits=target_logits).entropy()
    assert same.numpy() == pytest.approx(entropies.numpy(), rel=1e-4)


def test_depths_add_up() -> None:
    target_logits, first, second = logits(6, 8), logits(6, 8).requires_grad_(), logits(2, 8).requires_grad_()
    losses = DepthLosses(False)
    losses.add(first, target_logits, 1.0)
    losses.add(second, target_logits[:2], 0.5, labels=torch.tensor([3, 4]))
    losses.add(logits(0, 8), target_logits[:0], 0.25)
    losses.add_term(torch.tensor(2.0))
    log_probs = torch.log_softmax(second, -1)
    wanted = soft_cross_entropy(first, target_logits).mean() - 0.5 * (log_probs[0, 3] + log_probs[1, 4]) / 2 + 2.0
    assert losses.total().item() == pytest.approx(wanted.item(), rel=1e-5)
    scores = losses.scores()
    assert scores.num_positions.tolist() == [6, 2, 0]
    assert len((scores + scores).means()["overlap"]) == 3
    assert (scores + scores).means() == scores.means()
    losses.total().backward()
    assert first.grad is not None
    assert first.grad.abs().sum() > 0


def test_training_scores_a_part() -> None:
    num_rows = 3 * NUM_SCORED + 1
    target_logits, draft_logits = logits(num_rows, 8), logits(num_rows, 8)
    part, every = DepthLosses(True), DepthLosses(False)
    for losses in (part, every):
        losses.add(draft_logits, target_logits, 1.0)
    assert torch.equal(part.total(), every.total())
    assert every.scores().num_positions.tolist() == [num_rows]
    (num_scored,) = part.scores().num_positions.tolist()
    assert NUM_SCORED // 2 < num_scored <= NUM_SCORED


def test_shifts() -> None:
    counts = torch.tensor([[False, False, True, True, False, True]])
    assert counted_at(counts, 2, 4).tolist() == [[True, True, False, True]]
    assert counted_at(counts, 4, 4).tolist() == [[False, True, False, False]]
    values = torch.arange(6)[None, :, None]
    assert shifted_rows(values, 2, counted_at(counts, 2, 4)).flatten().tolist() == [2, 3, 5]
