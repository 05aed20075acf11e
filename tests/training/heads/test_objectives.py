"""Every objective computes what the paper says, written out position by position; and each can be learnt.

Oracles: the head modules run by hand on one position at a time, as a drafter would; EAGLE's unrolled steps against the
same head under plain causal attention over (true prefix, own drafts).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.drafting.heads.eagle import EagleHead
from outrider.drafting.heads.eagle3 import Eagle3Head
from outrider.drafting.heads.medusa import MedusaHeads
from outrider.drafting.heads.mlp_speculator import MlpSpeculator
from outrider.training.errors import SettingError
from outrider.training.frozen_target import FrozenTarget
from outrider.training.head_trainer import noise_generator
from outrider.training.heads.eagle import FEATURE_WEIGHT
from outrider.training.heads.eagle3 import most_frequent
from outrider.training.heads.interface import Batch, Objective, TargetView
from outrider.training.heads.options import TRAINED_FURTHER, HeadOptions
from outrider.training.heads.registry import build_objective
from outrider.training.heads.unroll import EVAL_DEPTHS
from tests.training.tiny import HEAD_METHODS, NUM_LAYERS, VOCAB_SIZE, tiny_batch, write_target

NUM_ROWS, LENGTH = 3, 11
OPTIONS = HeadOptions(num_heads=3, inner_dim=24, draft_vocab_size=20, ttt_steps=3, num_attention_heads=4)
COUNTS = np.random.default_rng(0).permutation(VOCAB_SIZE).astype(np.int64)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> FrozenTarget:
    return FrozenTarget(write_target(tmp_path_factory.mktemp("target")))


def objective_of(method: str, target: FrozenTarget, **changes: object) -> Objective:
    """A new objective whose head has been shaken, so that no part of it is at rest."""
    objective = build_objective(method, replace(OPTIONS, **changes), target, COUNTS, seed=2)  # type: ignore[arg-type]
    with torch.no_grad():
        for parameter in objective.parameters():
            if parameter.requires_grad:
                parameter.add_(
                    torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel())) * 0.1
                )
    return objective


def counted(batch: Batch, depth_offset: int) -> list[tuple[int, int]]:
    """(row, position t) where token t + depth_offset is in the row and counts; t leaves room for depth 0."""
    return [
        (row, position)
        for row in range(NUM_ROWS)
        for position in range(LENGTH - 2)
        if position + depth_offset < LENGTH and batch.counts[row, position + depth_offset]
    ]


def soft_loss(draft_logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    return -(target_probs * draft_logits.log_softmax(-1)).sum()


def law_at(view: TargetView, row: int, position: int) -> torch.Tensor:
    return view.read_out(view.final[row, position][None])[0]


def medusa_guess(
    head: MedusaHeads, batch: Batch, view: TargetView, row: int, position: int, depth: int
) -> torch.Tensor:
    return head(view.features[row, position][None])[0, depth]


def speculator_guess(
    head: MlpSpeculator, batch: Batch, view: TargetView, row: int, position: int, depth: int
) -> torch.Tensor:
    state = head.start(view.features[row, position][None])
    for step in range(depth + 1):
        state, logits = head.step(state, batch.token_ids[row, position + 1 + step][None], step)
    return logits[0]


@pytest.mark.parametrize("distil", [True, False])
@pytest.mark.parametrize(
    ("method", "guess", "decay"), [("medusa", medusa_guess, 0.8), ("mlp_speculator", speculator_guess, 1.0)]
)
def test_loss_position_by_position(
    target: FrozenTarget, method: str, guess: object, decay: float, distil: bool
) -> None:
    objective = objective_of(method, target, distil=distil).eval()
    batch, view = tiny_batch(target, NUM_ROWS, LENGTH, objective.feature_layers)
    assert objective.feature_layers == (NUM_LAYERS,)
    loss, scores = objective(batch, view, noise_generator(0, 0, 0))
    wanted = torch.tensor(0.0)
    for depth in range(OPTIONS.num_heads):
        where = counted(batch, 2 + depth)
        losses, agree, overlap = [], 0, 0.0
        for row, position in where:
            draft = guess(objective.head, batch, view, row, position, depth)  # type: ignore[operator]
            law = law_at(view, row, position + 1 + depth)
            label = batch.token_ids[row, position + 2 + depth]
            losses.append(soft_loss(draft, law.softmax(-1)) if distil else -draft.log_softmax(-1)[label])
            agree += int(draft.argmax() == law.argmax())
            overlap += float(torch.minimum(draft.softmax(-1), law.softmax(-1)).sum().detach())
        wanted = wanted + decay**depth * torch.stack(losses).mean()
        assert scores.num_positions[depth] == len(where)
        assert scores.agreement[depth] == agree
        assert scores.overlap[depth].item() == pytest.approx(overlap, rel=1e-4)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)


def served_features(
    head: EagleHead | Eagle3Head, batch: Batch, view: TargetView, row: int, position: int, num_steps: int
) -> list[torch.Tensor]:
    """What a drafter computes from `position` on: true features up to there, then its own; one forward a step."""
    head.hf_config._attn_implementation = "eager"
    tokens = batch.token_ids[row]
    features = list(head.fuse(view.features[row, : position + 1]))
    outputs: list[torch.Tensor] = []
    for step in range(num_steps):
        num_rows = position + 1 + step
        out = head(
            tokens[None, 1 : num_rows + 1], torch.stack([*features, *outputs])[None], torch.arange(num_rows)[None]
        )
        outputs.append(out[0, -1])
    return outputs


@pytest.mark.parametrize("is_training", [True, False])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("eagle", {"feature_noise": 0.0}),
        ("eagle", {"feature_noise": 0.0, "num_layers": 2, "ttt_steps": 1}),
        ("eagle3", {}),
        (
            "eagle3",
            {"norm_output": True, "norm_before_residual": False, "draft_vocab_size": 0, "feature_layers": (0, 6)},
        ),
    ],
)
def test_eagle_is_trained_as_it_is_served(
    target: FrozenTarget, method: str, changes: dict[str, object], is_training: bool
) -> None:
    objective = objective_of(method, target, **changes)
    objective.train(is_training)
    batch, view = tiny_batch(target, NUM_ROWS, LENGTH, objective.feature_layers)
    loss, scores = objective(batch, view, noise_generator(0, 0, 0))
    head, ids = objective.head, objective.head.target_ids
    num_steps = int(changes.get("ttt_steps", 3)) if is_training else EVAL_DEPTHS  # type: ignore[call-overload]
    assert len(scores.agreement) == num_steps
    wanted = torch.tensor(0.0)
    for depth in range(num_steps):
        losses, overlap = [], 0.0
        for row, position in counted(batch, 2 + depth):
            feature = served_features(head, batch, view, row, position, depth + 1)[depth]
            draft, law = head.logits(feature), law_at(view, row, position + 1 + depth)
            within = law.softmax(-1)[slice(None) if ids is None else ids]
            if ids is not None and is_training:
                said = bool((ids == batch.token_ids[row, position + 2 + depth]).any())
                within = said * within / within.sum()
            overlap += float(torch.minimum(draft.softmax(-1), within).sum().detach())
            if method == "eagle":
                distance = torch.nn.functional.smooth_l1_loss(feature, view.features[row, position + 1 + depth])
                losses.append(FEATURE_WEIGHT * distance + 0.1 * soft_loss(draft, within))
            else:
                losses.append(soft_loss(draft, within))
        wanted = wanted + 0.8**depth * torch.stack(losses).mean()
        assert scores.overlap[depth].item() == pytest.approx(overlap, rel=1e-3)
        assert scores.num_positions[depth].item() == pytest.approx(len(losses), rel=1e-5)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-4)


def test_eagle_noise_is_a_function_of_its_generator(target: FrozenTarget) -> None:
    objective = objective_of("eagle", target, feature_noise=0.1)
    batch, view = tiny_batch(target, NUM_ROWS, LENGTH, objective.feature_layers)
    losses = [objective(batch, view, noise_generator(0, index, 0))[0].item() for index in (4, 4, 5)]
    assert losses[0] == losses[1] != losses[2]
    objective.eval()
    assert (
        objective(batch, view, noise_generator(0, 4, 0))[0].item()
        == objective(batch, view, noise_generator(0, 5, 0))[0].item()
    )


@pytest.mark.parametrize(
    ("method", "loss"), [*((method, "cross_entropy") for method in HEAD_METHODS), ("eagle3", "acceptance")]
)
def test_it_can_be_learnt_and_the_target_stays(target: FrozenTarget, method: str, loss: str) -> None:
    options = replace(OPTIONS, num_attention_heads=0, loss=loss)
    objective = build_objective(method, options, target, COUNTS, seed=2)
    batch, view = tiny_batch(target, 8, 24, objective.feature_layers)
    frozen = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    trained = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=5e-3)
    before = objective.eval()(batch, view, noise_generator(0, 0, 0))[1].means()
    for step in range(60):
        loss = objective.train()(batch, view, noise_generator(0, step, 0))[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    after = objective.eval()(batch, view, noise_generator(0, 0, 0))[1].means()
    assert after["overlap"][0] > before["overlap"][0] + 0.1
    assert after["agreement"][0] > before["agreement"][0] + 0.1
    assert all(torch.equal(tensor, frozen[name]) for name, tensor in target.model.state_dict().items())
    assert not any(parameter.dtype != torch.float32 for parameter in trained)


def test_batches_without_counted_tokens(target: FrozenTarget) -> None:
    for method in HEAD_METHODS:
        objective = build_objective(method, replace(OPTIONS, num_attention_heads=0), target, COUNTS, seed=2)
        batch, view = tiny_batch(target, NUM_ROWS, LENGTH, objective.feature_layers)
        nothing = Batch(batch.token_ids, torch.zeros_like(batch.counts))
        loss, scores = objective(nothing, view, noise_generator(0, 0, 0))
        assert loss.item() == 0.0
        loss.backward()
        assert set(scores.means()["overlap"]) == {0.0}


def test_draft_vocabulary_is_the_most_frequent_tokens() -> None:
    counts = np.array([5, 0, 7, 5, 9, 5], dtype=np.int64)
    assert most_frequent(counts, 3).tolist() == [0, 2, 4]
    assert most_frequent(counts, 6).tolist() == list(range(6))


@pytest.mark.parametrize("method", TRAINED_FURTHER)
def test_a_run_may_begin_with_a_published_head(target: FrozenTarget, method: str, tmp_path: Path) -> None:
    """Oracle: the head that was exported gives the same loss, whatever the seed and the token counts of the new run."""
    trained = objective_of(method, target)
    trained.export(tmp_path / "head", torch.float32, "target")
    further = build_objective(method, HeadOptions(init=tmp_path / "head", ttt_steps=3), target, COUNTS[::-1], seed=7)
    batch, view = tiny_batch(target, NUM_ROWS, LENGTH, trained.feature_layers)
    with torch.no_grad():
        losses = [objective.train()(batch, view, noise_generator(0, 0, 0))[0] for objective in (trained, further)]
    torch.testing.assert_close(losses[0], losses[1])
    other = "dspark" if method == "eagle3" else "eagle3"
    with pytest.raises(SettingError, match=f"is a draft for {method}, not for --method {other}"):
        build_objective(other, HeadOptions(init=tmp_path / "head"), target, COUNTS, seed=0)
    with pytest.raises(SettingError, match="--num-layers, --draft-vocab-size: the shape of the head is that of --init"):
        HeadOptions(init=tmp_path / "head", num_layers=2, draft_vocab_size=9).check(method)
    with pytest.raises(SettingError, match="--init: a head for eagle cannot be trained further, only eagle3"):
        HeadOptions(init=tmp_path / "head").check("eagle")


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("lookahead", HeadOptions(), "--method 'lookahead': must be one of medusa"),
        ("medusa", HeadOptions(loss="total_variation"), "--loss 'total_variation': must be one of cross_entropy, acc"),
        ("medusa", HeadOptions(num_heads=0), "--num-heads must be at least 1"),
        ("mlp_speculator", HeadOptions(num_heads=1), "--num-heads must be at least 2 with --tie-weights"),
        ("eagle", HeadOptions(feature_noise=-0.1), "--feature-noise must not be negative"),
        ("eagle", HeadOptions(num_attention_heads=3), "--num-attention-heads 3: must be a multiple of 2"),
        ("eagle3", HeadOptions(draft_vocab_size=VOCAB_SIZE + 1), "--draft-vocab-size 49: the target has 48"),
        ("eagle3", HeadOptions(feature_layers=(1, 7)), "--feature-layer"),
        ("draft_model", HeadOptions(inner_dim=64), "--inner-dim 64: must be"),
        ("draft_model", HeadOptions(init=Path("/nowhere")), "--init /nowhere is not a checkpoint folder"),
    ],
)
def test_options_that_cannot_be(target: FrozenTarget, method: str, options: HeadOptions, words: str) -> None:
    with pytest.raises(SettingError, match=words):
        build_objective(method, options, target, COUNTS, seed=0)
