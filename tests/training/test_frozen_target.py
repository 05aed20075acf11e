"""The target's hidden layers carry transformers' numbers. Oracle: transformers' own output_hidden_states."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import NUM_LAYERS, VOCAB_SIZE, write_target
from transformers import AutoModelForCausalLM

from training.errors import SettingError
from training.frozen_target import FrozenTarget


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"))


def test_features_equal_hidden_states(target_dir: Path) -> None:
    token_ids = torch.arange(20).reshape(2, 10) % VOCAB_SIZE
    model = AutoModelForCausalLM.from_pretrained(target_dir)
    with torch.no_grad():
        wanted = model(token_ids, output_hidden_states=True, use_cache=False)
    target = FrozenTarget(target_dir)
    layers = (0, 2, NUM_LAYERS - 1, NUM_LAYERS)
    view = target.view(token_ids, layers)
    assert torch.equal(view.features, torch.cat([wanted.hidden_states[layer] for layer in layers], dim=-1))
    assert torch.equal(view.logits, wanted.logits)
    assert torch.allclose(view.features[..., -32:] @ target.lm_head.T, view.logits, atol=1e-5)
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    # The hooks are gone: another view asks for others.
    assert torch.equal(target.view(token_ids, (3,)).features, wanted.hidden_states[3])


def test_padding_on_the_right_changes_nothing_before_it(target_dir: Path) -> None:
    target = FrozenTarget(target_dir)
    row = torch.arange(12)[None] % VOCAB_SIZE
    padded = torch.cat([row, torch.zeros(1, 5, dtype=torch.long)], dim=1)
    alone, beside = target.view(row, (2, NUM_LAYERS)), target.view(padded, (2, NUM_LAYERS))
    assert torch.allclose(alone.features, beside.features[:, :12], atol=1e-5)
    assert torch.allclose(alone.logits, beside.logits[:, :12], atol=1e-5)


def test_what_cannot_be(target_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"hidden layers 0 to 6, not \[7\]"):
        FrozenTarget(target_dir).view(torch.zeros(1, 4, dtype=torch.long), (2, 7))
    with pytest.raises(SettingError, match="is not a checkpoint folder"):
        FrozenTarget(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(SettingError, match="cannot be loaded"):
        FrozenTarget(tmp_path)
