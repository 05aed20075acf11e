"""A head of the expanded target guesses what the small one guesses. Oracle: both measured on the same text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from models.make.agreement import load_for_measuring, score
from models.make.expand import Shape, expand
from models.make.expand_heads import expand_head
from outrider.training.data.head_data import load_windows
from outrider.training.data.tokenize_rows import RowEncoder
from outrider.training.errors import ExpansionError
from outrider.training.export import write_model
from outrider.training.frozen_target import FrozenTarget
from outrider.training.heads.options import HeadOptions
from outrider.training.heads.registry import build_objective
from tests.training.tiny import VOCAB_SIZE, write_target

OPTIONS = HeadOptions(num_heads=3, inner_dim=24, ttt_steps=2, draft_vocab_size=30, norm_before_residual=False)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A small target and its expanded twin, both in float32."""
    folder = tmp_path_factory.mktemp("targets")
    small_dir = write_target(folder / "small")
    small = LlamaForCausalLM.from_pretrained(small_dir, dtype=torch.float32)
    config = small.config
    heads = config.num_attention_heads
    shape = Shape(3 * config.hidden_size, config.num_hidden_layers + 2, 2 * config.intermediate_size, 2 * heads)
    write_model(small, small_dir, torch.float32)
    write_model(expand(small, shape), folder / "large", torch.float32)
    return small_dir, folder / "large"


@pytest.mark.parametrize("method", ["medusa", "mlp_speculator", "eagle", "eagle3"])
def test_guesses_stay_what_they_were(targets: tuple[Path, Path], tmp_path: Path, method: str) -> None:
    small_dir, large_dir = targets
    objective = build_objective(method, OPTIONS, FrozenTarget(small_dir), np.arange(VOCAB_SIZE), seed=3)
    with torch.no_grad():
        for parameter in objective.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.1)
    objective.export(tmp_path / "head", torch.float32, "small")
    assert expand_head(tmp_path / "head", small_dir, large_dir, tmp_path / "expanded") == method
    rows = np.random.default_rng(0).integers(0, VOCAB_SIZE, (4, 48))
    np.save(tmp_path / "rows.npy", rows)
    windows = load_windows([tmp_path / "rows.npy"], RowEncoder(small_dir), VOCAB_SIZE, 64)
    before, after = (
        score(load_for_measuring(head, target := FrozenTarget(folder, torch.float32)), target, windows).means()
        for head, folder in ((tmp_path / "head", small_dir), (tmp_path / "expanded", large_dir))
    )
    assert after["overlap"] == pytest.approx(before["overlap"], abs=1e-4)
    assert after["agreement"] == pytest.approx(before["agreement"], abs=1e-6)
    assert 0 < before["overlap"][0] < 0.9  # heads that always or never agree would show nothing


def test_refuses_what_is_no_head(targets: tuple[Path, Path], tmp_path: Path) -> None:
    small_dir, large_dir = targets
    with pytest.raises(ExpansionError, match="reads only tokens"):
        expand_head(small_dir, small_dir, large_dir, tmp_path / "out")
    objective = build_objective("medusa", OPTIONS, FrozenTarget(small_dir), np.arange(VOCAB_SIZE), seed=3)
    objective.export(tmp_path / "head", torch.float32, "small")
    with pytest.raises(ExpansionError, match="not an expansion"):
        expand_head(tmp_path / "head", large_dir, small_dir, tmp_path / "out")
