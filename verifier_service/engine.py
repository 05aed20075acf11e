"""The verifier's engine: one thread that owns the target model, its KV cache and every session.

    take commands -> one round of all sessions -> repeat

Not here: gRPC (server), what a round is (rounds).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

from outrider.drafting.methods.interface import DraftMethod
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.table import StateTable
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.grammar import GrammarCompiler, GrammarState
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.engine_thread import EngineThread
from outrider.shared.errors import Overloaded, TargetReplaced
from outrider.shared.messages import DraftMethodInfo, SessionSpec, VerifyStep
from outrider.verifier_service.admission import check_spec, check_start
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.rounds import EngineLimits, Rounds
from outrider.verifier_service.session import OnReply, VerifierSession
from outrider.verifier_service.timing.step_costs import StepCosts

log = logging.getLogger(__name__)

T = TypeVar("T")


class VerifierEngine:
    """The target model and its sessions. Any thread may call `open`, `submit` and `close`; none waits for a forward."""

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        limits: EngineLimits,
        certificate: Certificate,
        metrics: VerifierMetrics,
        step_costs: StepCosts,
        local_methods: Mapping[str, DraftMethod] | None = None,
    ) -> None:
        """local_methods: of local drafting, by name."""
        loaded = runner.loaded
        self.draft_methods = dict(local_methods or {})
        self.rounds = Rounds(runner, blocks, limits, metrics, step_costs, self.draft_methods)
        self._grammars = GrammarCompiler(loaded.path, loaded.vocab_size, loaded.eos_token_ids)
        self.blocks = blocks
        self.limits = limits
        self.certificate = certificate
        self.metrics = metrics
        self._sessions: dict[int, VerifierSession] = {}
        # Counted in `open`: the engine's thread may be many sessions behind.
        self._num_open = 0
        self._handles = itertools.count()
        self._lock = threading.Lock()
        # Called with each session that ends, while it has its KV blocks.
        self._on_end: list[Callable[[VerifierSession], None]] = []
        # Of the target's weights; written on the engine's thread.
        self.target_version = 1
        self._thread = EngineThread(
            "verifier-engine",
            has_work=self._has_work,
            work=self._work,
            patience_s=lambda: self.rounds.patience_s(self._sessions.values()),
        )

    @property
    def loaded(self) -> LoadedModel:
        return self.rounds.runner.loaded

    @property
    def states(self) -> StateTable | None:
        return self.rounds.scheduler.states

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        return sum(session.step is not None for session in list(self._sessions.values()))

    @property
    def round_us(self) -> tuple[int, ...]:
        return self.rounds.round_us

    @property
    def local_methods(self) -> tuple[DraftMethodInfo, ...]:
        return tuple(method.info for method in self.rounds.local.methods.values())

    def when_sessions_end(self, take: Callable[[VerifierSession], None], layers: tuple[int, ...]) -> None:
        """Gives `take` each session that ends, on the engine's thread, while it has its KV blocks.

        layers: hidden states that it reads by `rounds.read_rows`. Call it before `start`.
        """
        self.rounds.keep_layers(layers)
        self._on_end.append(take)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread after the forward in progress; open sessions get no further reply."""
        self._thread.stop()

    def compile_grammar(self, spec: SessionSpec) -> GrammarState | None:
        """The argument of `open` for a session with a grammar. May take seconds: not for an event loop."""
        if spec.sampling_params.grammar is None:
            return None
        grammar = self._grammars.compile(spec.sampling_params.grammar)
        grammar.allowed(spec.committed_token_ids)  # kept for `open`
        return grammar

    def open(
        self,
        spec: SessionSpec,
        on_reply: OnReply,
        grammar: GrammarState | None = None,
        target_version: int | None = None,
    ) -> int:
        """Checks and registers a session; returns its handle. Raises InvalidRequest, ExactModeRefused or Overloaded.

        target_version: of the weights that it must have; None: those that serve now. If they are replaced before it is
        registered, its reply is TargetReplaced.
        A handle, not the session id: the old stream of a session must not close the one reopened with a new epoch.
        """
        wanted_version = self.target_version if target_version is None else target_version
        loaded = self.loaded
        capacity = self.blocks.num_blocks * self.blocks.block_size
        check_spec(spec, loaded.vocab_size, self.limits.max_model_len, capacity, self.certificate)
        self.require_room()  # before what takes long: it is tried again at once
        params = spec.sampling_params
        processor = LogitsProcessor(params, spec.prompt_token_ids, loaded.eos_token_ids, grammar)
        check_start(spec, processor.permitted, loaded.vocab_size)
        session = VerifierSession(
            spec=spec,
            processor=processor,
            on_reply=on_reply,
            opened_at=time.perf_counter(),
            token_ids=[*spec.prompt_token_ids, *spec.committed_token_ids],
            chain_rule=self.limits.rejection_sample_method,
        )
        with self._lock:
            self.require_room()
            self._num_open += 1
        handle = next(self._handles)
        self._thread.command(lambda: self._register(handle, session, wanted_version))
        return handle

    def require_room(self) -> None:
        """Raises Overloaded while as many sessions are open as may be."""
        if self._num_open >= self.limits.max_num_seqs:
            raise Overloaded(f"{self.limits.max_num_seqs} sessions are open, this verifier's limit")

    def submit(self, handle: int, step: VerifyStep) -> None:
        """Requests the next tokens; errors come as the session's reply."""
        arrived = time.perf_counter()
        self._thread.command(lambda: self._begin(handle, step, arrived))

    def close(self, handle: int) -> None:
        """Frees everything the session holds; does nothing for an unknown session."""
        self._thread.command(lambda: self._close(handle))

    def check_integrity(self) -> None:
        """Raises IntegrityError if the bookkeeping is broken. Runs on the engine's thread, between forwards."""
        self.between_rounds(self.rounds.scheduler.check_integrity)

    def between_rounds(self, act: Callable[[], T]) -> T:
        """Returns act(), called on the engine's thread between two forwards; from any other thread."""
        return self._thread.between_rounds(act)

    # ---- on the engine's thread ----

    def swap_target(self, runner: ModelRunner, certificate: Certificate) -> int:
        """Makes the runner's weights the target; returns their version. Its cache must be this engine's own.

        Sessions that are still open end with TargetReplaced: nothing computed with the weights before is used again.
        """
        for handle, session in list(self._sessions.items()):
            self._close(handle)
            self.rounds.replies.fail(
                session, TargetReplaced("the target's weights were replaced while the session ran")
            )
        self.rounds.swap_runner(runner)
        self.certificate = certificate
        self.metrics.observe_certificate(certificate.holds)
        self.target_version += 1
        return self.target_version

    def _register(self, handle: int, session: VerifierSession, target_version: int) -> None:
        self._sessions[handle] = session
        if target_version != self.target_version:
            self._close(handle)
            self.rounds.replies.fail(
                session, TargetReplaced("the target's weights were replaced before the session began")
            )

    def _work(self) -> None:
        try:
            self.rounds.run(self._sessions.values())
        except Exception as error:
            for session in list(self._sessions.values()):
                if session.step is not None:
                    self.rounds.fail(session, error)

    def _has_work(self) -> bool:
        return any(session.step is not None for session in self._sessions.values())

    def _begin(self, handle: int, step: VerifyStep, arrived: float) -> None:
        session = self._sessions.get(handle)
        if session is not None:
            self.rounds.begin(session, step, arrived)

    def _close(self, handle: int) -> None:
        session = self._sessions.pop(handle, None)
        if session is not None:
            with self._lock:
                self._num_open -= 1
            try:
                for take in self._on_end:
                    take(session)
            finally:
                self.rounds.release(session)
