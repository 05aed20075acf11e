"""A llama target with two real matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from tests.drafting.checkpoints import plain_writer


@pytest.fixture(scope="package")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return plain_writer.write(folder, plain_writer.llama_config(), plain_writer.target_tensors())


@pytest.fixture(scope="package")
def target(target_dir: Path) -> TargetWeights:
    return load_target_weights(target_dir, torch.float32)
