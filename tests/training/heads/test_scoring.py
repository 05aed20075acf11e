"""Losses and estimates against sums written out in numpy."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax

from outrider.training.heads.interface import TargetView
from outrider.training.heads.scoring import (
    acceptance_sums,
    counted_at,
    negative_log_acceptance,
    shifted_rows,
    soft_cross_entropy,
    whole_laws,
)
from outrider.training.heads.sliced_loss import TargetLaws

RNG = np.random.default_rng(0)
DRAFT_IDS = [1, 2, 5, 6]


def logits(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.normal(0, 2, shape))


def laws_of(target_logits: torch.Tensor, target_ids: torch.Tensor | None = None) -> TargetLaws:
    """The laws of rows that are the logits themselves."""
    view = TargetView(target_logits[None], target_logits[None], lambda rows, _=None: rows, target_logits.shape[1])
    return whole_laws(view, target_ids)(torch.arange(len(target_logits)))


@pytest.mark.parametrize("draft_ids", [None, DRAFT_IDS])
def test_losses_and_overlap(draft_ids: list[int] | None) -> None:
    target_logits = logits(50, 8)
    draft_logits = logits(50, 8 if draft_ids is None else 4)
    ids = list(range(8)) if draft_ids is None else draft_ids
    target_probs = softmax(target_logits.numpy(), axis=-1)
    draft_probs, draft_log_probs = (kind(draft_logits.numpy(), axis=-1) for kind in (softmax, log_softmax))
    target_ids = None if draft_ids is None else torch.tensor(draft_ids)
    laws = laws_of(target_logits, target_ids)
    assert soft_cross_entropy(draft_logits, laws.probs).numpy() == pytest.approx(
        [-sum(target_probs[n, j] * draft_log_probs[n, i] for i, j in enumerate(ids)) for n in range(50)], rel=1e-4
    )
    accepted = np.array([sum(min(target_probs[n, j], draft_probs[n, i]) for i, j in enumerate(ids)) for n in range(50)])
    assert negative_log_acceptance(draft_logits, laws.probs).numpy() == pytest.approx(-np.log(accepted), rel=1e-4)
    agreement, overlap = acceptance_sums(draft_logits, laws)
    assert float(overlap) == pytest.approx(accepted.sum(), rel=1e-4)
    picked = [ids[index] for index in draft_probs.argmax(-1)]
    assert int(agreement) == int((target_probs.argmax(-1) == picked).sum())
    assert 0 < int(agreement) < 50


def test_the_losses_are_least_where_the_laws_are_one() -> None:
    target_logits = logits(20, 8)
    probs = laws_of(target_logits).probs
    same = soft_cross_entropy(target_logits, probs)
    assert (same <= soft_cross_entropy(logits(20, 8), probs)).all()
    entropies = torch.distributions.Categorical(logits=target_logits).entropy()
    assert same.numpy() == pytest.approx(entropies.numpy(), rel=1e-4)
    assert negative_log_acceptance(target_logits, probs).numpy() == pytest.approx(np.zeros(20), abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_the_cross_entropy(dtype: torch.dtype) -> None:
    """Against numpy's softmax; the target's law covers a part of its mass only, as with a reduced draft vocabulary."""
    draft_logits = logits(20, 8).to(dtype).requires_grad_()
    target_probs = laws_of(logits(20, 12)).probs[:, :8]
    weights = torch.linspace(0.1, 2, 20)
    (gradient,) = torch.autograd.grad((weights * soft_cross_entropy(draft_logits, target_probs)).sum(), draft_logits)
    draft_probs = softmax(draft_logits.detach().double().numpy(), axis=-1)
    expected = target_probs.sum(-1, keepdim=True).numpy() * draft_probs - target_probs.numpy()
    rounding = 2**-8 if dtype is torch.bfloat16 else 1e-6
    assert gradient.dtype is dtype
    assert gradient.double().numpy() == pytest.approx(weights[:, None].numpy() * expected, rel=rounding, abs=1e-6)


def test_where_nothing_is_accepted_the_loss_is_finite() -> None:
    apart = torch.tensor([[200.0, 0.0]], requires_grad=True)
    loss = negative_log_acceptance(apart, torch.tensor([[0.0, 1.0]]))
    (gradient,) = torch.autograd.grad(loss.sum(), apart)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize(
    "target_probs", [[0.45, 0.45, 0.02, 0.02, 0.02, 0.02, 0.01, 0.01], [0.5, 0.1, 0.1, 0.1, 0.1, 0.05, 0.03, 0.02]]
)
def test_acceptance_as_the_loss_accepts_more(target_probs: list[float]) -> None:
    """A draft that cannot be the target (a ramp over the tokens, two parameters) ends with more overlap."""
    probs, ramp = torch.tensor(target_probs), torch.arange(8.0)

    def overlap_after(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
        shape = torch.tensor([-0.1, 0.0], requires_grad=True)
        optimizer = torch.optim.Adam([shape], lr=0.02)
        for _ in range(1500):
            optimizer.zero_grad()
            loss_of((shape[0] * ramp + shape[1] * ramp**2)[None], probs[None]).sum().backward()
            optimizer.step()
        draft = (shape[0] * ramp + shape[1] * ramp**2).softmax(-1)
        return float(torch.minimum(draft, probs).sum().detach())

    assert overlap_after(negative_log_acceptance) > overlap_after(soft_cross_entropy) + 0.005


def test_shifts() -> None:
    counts = torch.tensor([[False, False, True, True, False, True]])
    assert counted_at(counts, 2, 4).tolist() == [[True, True, False, True]]
    assert counted_at(counts, 4, 4).tolist() == [[False, True, False, False]]
    values = torch.arange(6)[None, :, None]
    assert shifted_rows(values, 2, counted_at(counts, 2, 4)).flatten().tolist() == [2, 3, 5]
