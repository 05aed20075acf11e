"""The verifier's own draft methods: what is refused before it serves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from outrider.engine.model.load import load_model
from outrider.shared.errors import ConfigError
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.local_methods import build_local_methods

MODELS = Path(__file__).parents[3] / "models"


@pytest.mark.parametrize("prefix", ["--local-", "speculative_config: "])
def test_a_method_that_the_target_lacks_is_refused_by_the_setting_of_the_caller(prefix: str) -> None:
    target = str(MODELS / "demo-draft")
    loaded = load_model(target, dtype="float32", num_threads=1)
    config = VerifierConfig(model=target, local_methods=("mtp",), dtype="float32", num_threads=1)
    with pytest.raises(ConfigError, match=f"^{prefix}methods: {target}: "):
        build_local_methods(config, loaded, logging.getLogger(), prefix)
