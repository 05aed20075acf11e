"""The verifier's engine in this process, built as in its service; it drafts between its forwards. Loads torch."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType

from prometheus_client import CollectorRegistry

from outrider.engine.model.loaded import LoadedModel
from outrider.shared.messages import VerifierInfo
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.start import build_engine, describe

_LOG = logging.getLogger("outrider.offline")


@dataclass(frozen=True)
class Engines:
    """The engine, which runs between `start_engines` and `close`, and what it serves."""

    verifier: VerifierEngine
    target: VerifierInfo
    loaded: LoadedModel
    # The verifier's metrics.
    registry: CollectorRegistry

    def close(self) -> None:
        self.verifier.stop()
        self.loaded.close()


def start_engines(config: VerifierConfig, log: logging.Logger = _LOG) -> Engines:
    """Builds and starts the engine. log: of the steps of loading.

    Raises ConfigError, ModelRefused or CheckpointRefused.
    """
    # An ended session stays in an engine until its next command, so allow twice the number.
    config = dataclasses.replace(config, max_num_seqs=2 * config.max_num_seqs)
    registry = CollectorRegistry()
    with _no_main_module():
        verifier, loaded = build_engine(config, registry, log, draft_prefix="speculative_config: ")
    target = describe(config, verifier)
    verifier.start()
    return Engines(verifier, target, loaded, registry)


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
