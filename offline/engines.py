"""The engines of verifier and drafter in this process, built as their services build them. Loads torch."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from prometheus_client import CollectorRegistry

from drafter_service.config import DrafterConfig
from drafter_service.engine import DrafterEngine
from drafter_service.methods.registry import build_methods
from drafter_service.metrics import DrafterMetrics
from engine.model import LoadedModel
from gateway.drafter_choice import fits
from shared.errors import ConfigError
from shared.messages import DraftMethodInfo, VerifierInfo
from verifier_service.__main__ import build_engine, describe
from verifier_service.config import VerifierConfig
from verifier_service.engine import VerifierEngine


@dataclass(frozen=True)
class Engines:
    """Both run between `start_engines` and `close`. methods: by name; without a drafter there are none."""

    verifier: VerifierEngine
    drafter: DrafterEngine | None
    target: VerifierInfo
    methods: dict[str, DraftMethodInfo]
    loaded: LoadedModel

    def close(self) -> None:
        self.verifier.stop()
        if self.drafter is not None:
            self.drafter.stop()
        self.loaded.close()


def start_engines(verifier_config: VerifierConfig, drafter_config: DrafterConfig | None) -> Engines:
    """Raises ConfigError, ModelRefused or CheckpointRefused."""
    # Sessions that have ended stand in an engine until its next command: room for as many new ones beside them.
    verifier_config = dataclasses.replace(verifier_config, max_num_seqs=2 * verifier_config.max_num_seqs)
    with _no_main_module():
        verifier, loaded = build_engine(verifier_config, CollectorRegistry(), logging.getLogger("outrider.offline"))
    try:
        target = describe(verifier_config, verifier, loaded)
        drafter = _build_drafter(drafter_config, target) if drafter_config is not None else None
    except BaseException:
        loaded.close()
        raise
    verifier.start()
    if drafter is not None:
        drafter.start()
    methods = {name: method.info for name, method in drafter.methods.items()} if drafter is not None else {}
    return Engines(verifier, drafter, target, methods, loaded)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Tensor parallel ranks are spawned, and a spawned process runs the main module once more. A script written for
    vLLM has no `if __name__ == "__main__"`: each rank would make an LLM of its own. No rank needs anything of it.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _build_drafter(config: DrafterConfig, target: VerifierInfo) -> DrafterEngine:
    methods = build_methods(config, lambda _message: None)
    for name, method in methods.items():
        if not fits(method.info, target):
            raise ConfigError(
                f"speculative_config: the {name} draft has another vocabulary or another width than {target.model}",
                param="model",
            )
    return DrafterEngine(methods, max_num_seqs=2 * config.max_num_seqs, metrics=DrafterMetrics(CollectorRegistry()))
