"""One tiny model and its certificate for all tests of the verifier."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.certificate import Certificate, certify
from engine.model import LoadedModel, load_model
from engine.runner import ModelRunner
from tests.verifier_service.engine_client import save_llama


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    """A second thread gains nothing on a tiny model and waits for a core at every barrier."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(str(checkpoint), dtype="float32")


@pytest.fixture(scope="session")
def certificate(loaded: LoadedModel) -> Certificate:
    return certify(loaded, ModelRunner(loaded, loaded.make_cache(64, 4)))
