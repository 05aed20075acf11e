"""The verifier's and drafter's engines in this process, built as in their services. Loads torch."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from prometheus_client import CollectorRegistry

from outrider.drafter_service.config import DrafterConfig
from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafting.methods.registry import build_methods
from outrider.engine.model.loaded import LoadedModel
from outrider.gateway.fleet.drafter_choice import fits
from outrider.shared.errors import ConfigError
from outrider.shared.messages import DraftMethodInfo, VerifierInfo
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.start import build_engine, describe

_LOG = logging.getLogger("outrider.offline")


@dataclass(frozen=True)
class Engines:
    """Both run between `start_engines` and `close`. methods: by name; empty without a drafter."""

    verifier: VerifierEngine
    drafter: DrafterEngine | None
    target: VerifierInfo
    methods: dict[str, DraftMethodInfo]
    loaded: LoadedModel
    # The verifier's metrics.
    registry: CollectorRegistry

    def close(self) -> None:
        self.verifier.stop()
        if self.drafter is not None:
            self.drafter.stop()
        self.loaded.close()


def start_engines(
    verifier_config: VerifierConfig, drafter_config: DrafterConfig | None, log: logging.Logger = _LOG
) -> Engines:
    """Builds and starts them. log: of the steps of loading. Raises ConfigError, ModelRefused or CheckpointRefused."""
    # An ended session stays in an engine until its next command, so allow twice the number.
    verifier_config = dataclasses.replace(verifier_config, max_num_seqs=2 * verifier_config.max_num_seqs)
    with _no_main_module():
        registry = CollectorRegistry()
        verifier, loaded = build_engine(verifier_config, registry, log)
    try:
        target = describe(verifier_config, verifier, loaded)
        drafter = _build_drafter(drafter_config, target, loaded, log) if drafter_config is not None else None
    except BaseException:
        loaded.close()
        raise
    verifier.start()
    if drafter is not None:
        drafter.start()
    methods = {name: method.info for name, method in drafter.methods.items()} if drafter is not None else {}
    return Engines(verifier, drafter, target, methods, loaded, registry)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Tensor parallel ranks are spawned processes, which run the main module again. A script written for vLLM has no
    `if __name__ == "__main__"`: each rank would create its own LLM. Ranks need nothing from the main module.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _build_drafter(
    config: DrafterConfig, target: VerifierInfo, loaded: LoadedModel, log: logging.Logger
) -> DrafterEngine:
    methods = build_methods(config, log.info, loaded)
    for name, method in methods.items():
        if not fits(method.info, target):
            raise ConfigError(
                f"speculative_config: the {name} draft differs from {target.model} in vocabulary or width",
                param="model",
            )
    return DrafterEngine(methods, max_num_seqs=2 * config.max_num_seqs, metrics=DrafterMetrics(CollectorRegistry()))
