"""One tiny model, its certificate and an engine for all tests of the verifier."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from engine.certificate import Certificate, certify
from engine.model import LoadedModel, load_model
from engine.runner import ModelRunner
from tests.verifier_service.engine_client import (
    PARAMS,
    EngineShape,
    generate,
    make_spec,
    prompt_of,
    running_engine,
    save_llama,
)
from verifier_service.engine import VerifierEngine


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
    """Commits of plain decoding, one token a forward, alone, without any cache: what everything must equal."""
    known: dict[tuple[str, int], list] = {}

    def plain(name: str, prompt_seed: int) -> list:
        if (name, prompt_seed) not in known:
            with running_engine(loaded, certificate, EngineShape(prefix_caching=False)) as engine:
                known[name, prompt_seed] = generate(engine, make_spec(prompt_of(prompt_seed), PARAMS[name]))
        return known[name, prompt_seed]

    return plain


@pytest.fixture
def engine(loaded: LoadedModel, certificate: Certificate) -> Iterator[VerifierEngine]:
    with running_engine(loaded, certificate) as running:
        yield running
