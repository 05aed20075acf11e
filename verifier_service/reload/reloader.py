"""Takes other weights into service: reads them, lets the sessions of those that serve end, and swaps between rounds.

    read and check beside (candidate.py) -> drain -> swap -> the old ones are let go

What fails before the swap leaves the old weights serving. Not here: who may open meanwhile (served_target.py).
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from outrider.drafting.serving.loading import DraftLoader
from outrider.shared.errors import InvalidRequest
from outrider.shared.machine.memory import give_back_freed_memory
from outrider.shared.telemetry import MetricsOf
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.reload.candidate import Candidate, read_candidate
from outrider.verifier_service.reload.served_target import ServedTarget, TargetState

# seconds; the longest drain
MAX_DRAIN_S = 3600.0
# seconds; shortest drain, where one is given: gateways look at a verifier each second (gateway/fleet/pool.py), and have
# then begun to ask for the new kind
_NOTICE_S = 2.5
# seconds between two looks at the sessions that still run
_LOOK_AGAIN_S = 0.02


class TargetMetrics:
    """Which version of the target serves, and what became of others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        make = MetricsOf(registry)
        self.version = make.gauge("target_version", "Version of the target's weights; 1: the first.")
        self.version.set(1)
        text = "Loads of other weights of the target, by outcome: taken, same or refused."
        self.reloads = make.counter("target_reloads", text, ("outcome",))
        self.ended = make.counter("target_reload_ended_sessions", "Sessions that other weights ended.")


class TargetReloader:
    """Replaces the engine's target. `load` may be called from any thread but the engine's, and takes long."""

    def __init__(
        self,
        config: VerifierConfig,
        engine: VerifierEngine,
        served: ServedTarget,
        drafts: DraftLoader,
        metrics: TargetMetrics,
        log: logging.Logger,
    ) -> None:
        """drafts: of the engine's own draft methods; some read the target's weights too."""
        self._config, self._engine, self._served, self._drafts = config, engine, served, drafts
        self._metrics, self._log = metrics, log

    def load(self, path: str, drain_s: float) -> TargetState:
        """Returns once the weights serve. drain_s: seconds that sessions of the weights before may go on.

        Raises InvalidRequest for what cannot be used, Overloaded for too little memory and while weights are loaded.
        """
        if not 0.0 <= drain_s <= MAX_DRAIN_S:
            raise InvalidRequest(f"drain_s must be between 0 and {MAX_DRAIN_S:g}, got {drain_s:g}", param="drain_s")
        try:
            with self._drafts.alone():
                return self._load(path, drain_s)
        except Exception as error:
            self._log.warning("%s is not taken as the target: %s", path, error)
            self._metrics.reloads.labels("refused").inc()
            raise

    def _load(self, path: str, drain_s: float) -> TargetState:
        candidate = read_candidate(path, self._engine.rounds.runner, self._config, self._log.info)
        if candidate.numerics == self._served.state.numerics:
            self._metrics.reloads.labels("same").inc()
            self._log.info("%s is what serves already", path)
            return self._served.state
        self._require_certificate(candidate)
        swap_heads = self._drafts.rebuilt(candidate.loaded)
        self._served.drain_for(candidate.numerics)
        try:
            self._drain(drain_s)
            state = self._engine.between_rounds(lambda: self._swap(candidate, swap_heads))
        except BaseException:
            if self._served.state.next_numerics:
                self._served.settle(self._served.state.numerics, self._served.state.version)
            raise
        self._metrics.reloads.labels("taken").inc()
        self._metrics.version.set(state.version)
        self._log.info("%s serves from now on, version %d (%s)", path, state.version, state.numerics)
        gc.collect()  # a model is held by cycles, and the next reload may come before a collection
        give_back_freed_memory()
        return state

    def _require_certificate(self, candidate: Candidate) -> None:
        """Raises InvalidRequest where exact mode would end: the kernels are the same, so the weights are at fault."""
        if self._engine.certificate.holds and not candidate.certificate.holds:
            raise InvalidRequest(f"{candidate.loaded.path}: {candidate.certificate.describe()}", param="path")

    def _drain(self, drain_s: float) -> None:
        """Waits until no session runs, gateways having had notice, or the time is over."""
        started = time.monotonic()
        while (waited_s := time.monotonic() - started) < drain_s:
            if waited_s >= _NOTICE_S and self._engine.num_sessions == 0:
                return
            time.sleep(min(_LOOK_AGAIN_S, drain_s - waited_s))

    def _swap(self, candidate: Candidate, swap_heads: Callable[[], None]) -> TargetState:
        """On the engine's thread. The state changes with the weights: no later session can open on those before."""
        self._metrics.ended.inc(self._engine.num_sessions)
        version = self._engine.swap_target(candidate.runner, candidate.certificate)
        swap_heads()
        self._served.settle(candidate.numerics, version)
        return self._served.state
