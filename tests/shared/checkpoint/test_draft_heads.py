"""Heads are told from models, and from heads of another target, without torch; recognise.py is the oracle."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.drafting.checkpoints.recognise import recognise
from outrider.shared.checkpoint.draft_heads import (
    is_draft_head,
    longest_context,
    mismatch,
    require_model,
    target_name,
)
from outrider.shared.errors import ConfigError

MODELS = Path(__file__).parents[3] / "models"
CHECKPOINTS = sorted(path.parent for path in MODELS.glob("*/config.json"))


def config_of(name: str) -> dict[str, object]:
    config: dict[str, object] = json.loads((MODELS / name / "config.json").read_text())
    return config


@pytest.mark.parametrize("folder", CHECKPOINTS, ids=lambda folder: folder.name)
def test_a_head_is_what_the_loader_of_heads_recognises(folder: Path) -> None:
    is_head = recognise(folder) != "draft_model"
    assert is_draft_head(folder) == is_head
    if is_head:
        with pytest.raises(ConfigError, match=f"^--model: .*{folder.name} is a draft head"):
            require_model(folder, "--model")
    else:
        require_model(folder, "--model")


@pytest.mark.parametrize("head", ["demo-eagle", "demo-eagle3", "demo-medusa", "demo-mlp-speculator"])
def test_a_head_is_of_its_target(head: str) -> None:
    assert mismatch(config_of(head), config_of("demo-target")) == ""
    assert mismatch(config_of(head), {"text_config": config_of("demo-target")}) == ""
    assert mismatch(config_of(head), config_of("demo-hybrid")).endswith("is 320, the target's 160")


def test_the_vocabulary_counts_too() -> None:
    other = {**config_of("demo-target"), "vocab_size": 5000}
    assert mismatch(config_of("demo-eagle"), other) == "its vocab_size is 4096, the target's 5000"


def test_names_and_lengths() -> None:
    assert target_name(config_of("demo-eagle3")) == "demo-target"
    assert target_name(config_of("demo-eagle")) == ""
    assert longest_context(config_of("demo-target")) == 2048
    assert longest_context({"text_config": {"n_positions": 77}}) == 77
    assert longest_context({}) is None


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--target: .* is not a checkpoint folder"):
        require_model(tmp_path, "--target")
