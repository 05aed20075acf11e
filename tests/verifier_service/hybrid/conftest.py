"""One tiny Qwen3.5 for the tests of a target with recurrent layers, in the place of the verifier's tiny Llama."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.engine.certificate import Certificate, certify
from outrider.engine.model.load import load_model
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.run.runner import ModelRunner
from tests.verifier_service.engine_client import plain_decoding, save_hybrid


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_hybrid(tmp_path_factory.mktemp("hybrid"), max_len=1024)


@pytest.fixture(scope="session")
def loaded(checkpoint: Path) -> LoadedModel:
    return load_model(str(checkpoint), dtype="float32")


@pytest.fixture(scope="session")
def certificate(loaded: LoadedModel) -> Certificate:
    return certify(loaded, ModelRunner(loaded, loaded.make_cache(64, 4), loaded.make_states(1)))


@pytest.fixture(scope="session")
def truth(loaded: LoadedModel, certificate: Certificate) -> Callable[[str, int], list]:
    return plain_decoding(loaded, certificate)
