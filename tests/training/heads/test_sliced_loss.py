"""A loss in slices is the loss at once: its value, its gradients and its estimates, and no more logits than a slice's.

Oracle: the plain formula over whole [positions, vocabulary] arrays in float64, differentiated by autograd.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from outrider.training.frozen_target import FrozenTarget
from outrider.training.head_trainer import noise_generator
from outrider.training.heads import sliced_loss
from outrider.training.heads.interface import Objective, TargetView
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.registry import build_objective
from outrider.training.heads.scoring import LOSSES, NUM_SCORED, DepthLosses
from tests.training.tiny import HEAD_METHODS, VOCAB_SIZE, tiny_batch, write_target

VOCAB, WIDTH, NUM_ROWS, LENGTH = 11, 5, 3, 13
TARGET_IDS = torch.tensor([0, 3, 4, 9])
GENERATOR = torch.Generator().manual_seed(0)
# (offset, weight, weight of the labels) per depth; the last has no position
DEPTHS = ((1, 1.0, 0.0), (2, 0.5, 0.25), (4, 0.0, 2.0), (LENGTH, 1.0, 0.0))


@pytest.fixture(params=[1, 2, 7, 10**6])
def slice_size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    use_slices_of(request.param, VOCAB, monkeypatch)
    return int(request.param)


def use_slices_of(num_positions: int, vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Objective, "slice_bytes", num_positions * vocab_size * sliced_loss._BYTES_PER_LOGIT)


class OneLinear(Objective):
    """An objective whose head is an output head alone, and one parameter that no loss depends on."""

    def __init__(self, num_tokens: int, loss: str) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, num_tokens)
        for parameter in self.head.parameters():
            nn.init.normal_(parameter, generator=GENERATOR)
        self.unused = nn.Parameter(torch.ones(1))
        self.loss = loss
        self.num_logits: list[int] = []

    def read_out(self, rows: torch.Tensor) -> torch.Tensor:
        self.num_logits.append(len(rows))
        logits: torch.Tensor = self.head(rows)
        return logits


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("target_ids", [None, TARGET_IDS])
def test_slices_are_the_plain_formula(slice_size: int, loss: str, target_ids: torch.Tensor | None) -> None:
    num_tokens = VOCAB if target_ids is None else len(target_ids)
    objective = OneLinear(num_tokens, loss)
    target_head, num_laws = random(VOCAB, WIDTH), list[int]()

    def read_out(hidden: torch.Tensor) -> torch.Tensor:
        num_laws.append(len(hidden))
        return hidden @ target_head.T

    view = TargetView(random(NUM_ROWS, LENGTH, 1), random(NUM_ROWS, LENGTH, WIDTH), read_out, VOCAB)
    ids = torch.arange(VOCAB) if target_ids is None else target_ids
    target_probs = (view.final.double() @ target_head.double().T).softmax(-1)
    weight, bias = (each.detach().double().requires_grad_() for each in objective.head.parameters())
    inputs: list[torch.Tensor] = []
    wide_inputs: list[torch.Tensor] = []
    wanted, overlaps = torch.zeros((), dtype=torch.float64), list[float]()
    losses = DepthLosses(objective.eval(), view, target_ids)
    for offset, soft_weight, label_weight in DEPTHS:
        where = torch.rand(NUM_ROWS, LENGTH, generator=GENERATOR) < 0.7
        where[:, max(0, LENGTH - offset) :] = False
        num_rows = int(where.sum())
        labels = torch.randint(num_tokens, (num_rows,), generator=GENERATOR) if label_weight else None
        rows = random(num_rows, WIDTH).requires_grad_()
        losses.add(rows, objective.read_out, where, offset, soft_weight, labels, label_weight)
        wide = rows.detach().double().requires_grad_()
        log_probs = (wide @ weight.T + bias).log_softmax(-1)
        batch_index, position = where.nonzero(as_tuple=True)
        laws = target_probs[batch_index, position + offset][:, ids]
        accepted = torch.minimum(log_probs.exp(), laws).sum(-1)
        soft = -(laws * log_probs).sum(-1) if loss == "cross_entropy" else -accepted.log()
        wanted = wanted + soft_weight * soft.sum() / max(1, num_rows)
        if labels is not None:
            wanted = wanted - label_weight * log_probs[torch.arange(num_rows), labels].sum() / max(1, num_rows)
        overlaps.append(accepted.sum().item())
        inputs.append(rows)
        wide_inputs.append(wide)
    losses.add_term(3.0 * inputs[0].sum())
    wanted = wanted + 3.0 * wide_inputs[0].sum()

    total, scores = losses.result()
    (total / 4).backward()
    (wanted / 4).backward()
    assert total.item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-5)
    assert scores.overlap.tolist() == pytest.approx(overlaps, rel=1e-5)
    assert scores.num_positions.tolist() == [len(rows) for rows in inputs]
    for found, oracle in [*zip(inputs, wide_inputs, strict=True), (objective.head.weight, weight)]:
        assert found.grad is not None
        assert oracle.grad is not None
        assert torch.allclose(found.grad.double(), oracle.grad, rtol=1e-4, atol=1e-6)
    assert objective.unused.grad is None
    with torch.no_grad():
        assert losses.result()[0].item() == pytest.approx(wanted.item(), rel=1e-5, abs=1e-5)
    # Each of the target's distributions is computed once in each pass, whatever the number of depths.
    assert max(num_laws) <= slice_size
    assert max(objective.num_logits) <= slice_size
    assert sum(num_laws) <= 2 * NUM_ROWS * LENGTH


def test_a_reduced_vocabulary_is_trained_on_its_part_of_the_law(slice_size: int) -> None:
    """Over texts drawn from the target: loss and gradients are in expectation those of the whole law."""
    objective, target_head = OneLinear(len(TARGET_IDS), "cross_entropy"), random(VOCAB, WIDTH)
    nums_logits = set[int]()

    def read_out(hidden: torch.Tensor, token_ids: torch.Tensor | None = None) -> torch.Tensor:
        logits = hidden @ (target_head if token_ids is None else target_head[token_ids]).T
        nums_logits.add(logits.shape[1])
        return logits

    view = TargetView(random(1, 2, 1), random(1, 2, WIDTH), read_out, VOCAB)
    where, rows = torch.tensor([[True, False]]), random(1, WIDTH)

    def loss_of(text: list[int]) -> list[torch.Tensor]:
        inputs = rows.clone().requires_grad_()
        losses = DepthLosses(objective, view, TARGET_IDS, torch.tensor([text]))
        losses.add(inputs, objective.read_out, where, 0, 1.0)
        total, scores = losses.result()
        if scores.num_positions[0]:
            assert scores.num_positions.tolist() == [1.0]
        gradients = torch.autograd.grad(total, [inputs, objective.head.weight], allow_unused=True)
        return [total.detach(), *(torch.zeros(()) if each is None else each for each in gradients)]

    law = (view.final[0, 0] @ target_head.T).softmax(-1)
    expected = [torch.zeros(()), torch.zeros(1, WIDTH), torch.zeros(len(TARGET_IDS), WIDTH)]
    for token in range(VOCAB):
        expected = [sum_ + law[token] * each for sum_, each in zip(expected, loss_of([0, token]), strict=True)]
    assert nums_logits == {len(TARGET_IDS)}
    objective.eval()
    whole = loss_of([0, 0])
    assert nums_logits == {len(TARGET_IDS), VOCAB}
    assert whole[0] > 0
    assert all(torch.allclose(*each, rtol=1e-4, atol=1e-6) for each in zip(expected, whole, strict=True))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget(write_target(tmp_path_factory.mktemp("target")))


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *((method, {"loss": loss}) for method in HEAD_METHODS for loss in LOSSES),
        ("medusa", {"distil": False, "share_lm_head": False}),
        ("mlp_speculator", {"distil": False, "tie_weights": False}),
    ],
)
def test_every_head_has_the_same_gradients_in_slices(
    target: FrozenTarget, method: str, changes: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = replace(HeadOptions(num_heads=3, inner_dim=24, draft_vocab_size=20, ttt_steps=3), **changes)  # type: ignore[arg-type]
    objective = build_objective(method, options, target, np.arange(VOCAB_SIZE), seed=2)
    batch, view = tiny_batch(target, 3, 11, objective.feature_layers)
    found = []
    for size in (10**6, 5, 1):
        use_slices_of(size, VOCAB_SIZE, monkeypatch)
        objective.zero_grad()
        loss, scores = objective(batch, view, noise_generator(0, 0, 0))
        loss.backward()
        gradients = {name: each.grad for name, each in objective.named_parameters() if each.requires_grad}
        assert any(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
        found.append((loss.item(), scores.means(), gradients))
    for loss_value, means, gradients in found[1:]:
        assert loss_value == pytest.approx(found[0][0], rel=1e-5)
        assert means["overlap"] == pytest.approx(found[0][1]["overlap"], abs=1e-4)
        assert means["agreement"] == found[0][1]["agreement"]
        for name, gradient in gradients.items():
            assert (gradient is None) == (found[0][2][name] is None), name
            assert gradient is None or torch.allclose(gradient, found[0][2][name], rtol=1e-4, atol=1e-5), name


def test_training_scores_a_part(slice_size: int) -> None:
    where = torch.ones(1, 3 * NUM_SCORED + 1, dtype=torch.bool)
    objective, target_head = OneLinear(VOCAB, "cross_entropy"), random(VOCAB, WIDTH)
    final = random(1, where.shape[1], WIDTH)
    view = TargetView(final, final, lambda hidden: hidden @ target_head.T, VOCAB)
    totals, counts = [], []
    for is_training in (True, False):
        losses = DepthLosses(objective.train(is_training), view)
        losses.add(final[0], objective.read_out, where, 0, 1.0)
        total, scores = losses.result()
        totals.append(total)
        counts.append(int(scores.num_positions[0]))
    assert torch.equal(*totals)
    assert counts[1] == where.numel()
    assert NUM_SCORED // 2 < counts[0] <= NUM_SCORED
