"""A llama target with two real matrices, and one torch thread (the heads are tiny)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from outrider.drafting.checkpoints.target_weights import TargetWeights, load_target_weights
from tests.drafting.checkpoints import plain_writer


@pytest.fixture(autouse=True, scope="package")
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return plain_writer.write(folder, plain_writer.llama_config(), plain_writer.target_tensors())


@pytest.fixture(scope="package")
def target(target_dir: Path) -> TargetWeights:
    return load_target_weights(target_dir, torch.float32)
