"""One tiny model, its certificate and an engine for all tests of the verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from outrider.engine.certificate import Certificate, certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from outrider.verifier_service.engine import VerifierEngine
from tests.verifier_service.engine_client import (
    plain_decoding,
    running_engine,
    save_llama,
)


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


@pytest.fixture(scope="session")
def truth(loaded: LoadedModel, certificate: Certificate) -> Callable[[str, int], list]:
    return plain_decoding(loaded, certificate)


@pytest.fixture
def engine(loaded: LoadedModel, certificate: Certificate) -> Iterator[VerifierEngine]:
    with running_engine(loaded, certificate) as running:
        yield running
