"""The drafter's engine: one thread that owns every draft method and every session.

    take commands -> catch up on a long backlog -> one batch of proposals per method -> reply -> repeat

Not here: gRPC (server.py) and proposing tokens (drafting/methods/).
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.predicted import with_predictions
from outrider.drafting.serving.combined import with_lookups
from outrider.drafting.session import LONG_REPORT, DraftSession, OnReply, no_flush
from outrider.engine.sampling.grammar import GrammarState
from outrider.shared.engine_thread import EngineThread
from outrider.shared.errors import InvalidRequest, OutriderError, Overloaded
from outrider.shared.messages import DraftStep, HiddenStates, Proposal, ProposalReply, SessionSpec, Timings

log = logging.getLogger(__name__)

T = TypeVar("T")

# share of the last batch's duration; longest wait of a batch for that batch's other sessions
_PATIENCE_SHARE = 0.3
_LONGEST_PATIENCE_S = 0.002
# token ids; limit of the wire, for methods that work with any vocabulary
_MAX_VOCAB_SIZE = 2**31


class DrafterEngine:
    """The draft methods and sessions. Any thread may call `open`, `submit` and `close`; none waits for drafts."""

    def __init__(self, methods: Mapping[str, DraftMethod], *, max_num_seqs: int, metrics: DrafterMetrics) -> None:
        self.methods = with_predictions(with_lookups(methods))
        self._max_num_seqs = max_num_seqs
        self._metrics = metrics
        self._sessions: dict[int, DraftSession] = {}
        # Counted in `open`: the engine's thread may be many sessions behind.
        self._num_open = 0
        # Sessions whose method may have a backlog of committed tokens to compute.
        self._behind: deque[int] = deque()
        self._handles = itertools.count()
        self._lock = threading.Lock()
        # Sessions of the last batch without a new step; sessions verified together come back together.
        self._expected: set[int] = set()
        self._first_asked_at = 0.0
        self._propose_s = 0.0
        self._thread = EngineThread(
            "drafter-engine",
            has_work=lambda: bool(self._behind or self._asked()),
            work=self._work,
            patience_s=self._patience_s,
        )

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._thread.stop()

    def compile_grammar(self, spec: SessionSpec) -> GrammarState | None:
        """Compiles the session's grammar for `open` if its method uses grammars, else None; takes seconds at worst."""
        grammar, method = spec.sampling_params.grammar, self.methods.get(spec.method)
        if grammar is None or method is None or method.grammars is None:
            return None
        return method.grammars.compile(grammar)

    def open(
        self,
        spec: SessionSpec,
        on_reply: OnReply,
        grammar: GrammarState | None = None,
        flush: Callable[[], None] = no_flush,
    ) -> int:
        """Registers a session and returns its handle. Raises InvalidRequest (method, token ids) or Overloaded.

        flush: called after all replies of a batch, once for equal ones.
        """
        if spec.method not in self.methods:
            raise InvalidRequest(
                f"method {spec.method!r} is not served here, only {', '.join(self.methods)}", param="method"
            )
        self._check_tokens(spec.method, "prompt_token_ids", spec.prompt_token_ids)
        self._check_tokens(spec.method, "committed_token_ids", spec.committed_token_ids)
        with self._lock:
            if self._num_open >= self._max_num_seqs:
                raise Overloaded(f"{self._max_num_seqs} sessions are open, this drafter's limit")
            self._num_open += 1
        token_ids = [*spec.prompt_token_ids, *spec.committed_token_ids]
        session = DraftSession(spec, token_ids, on_reply, grammar=grammar, flush=flush)
        handle = next(self._handles)
        self._thread.command(lambda: self._open(handle, session))
        return handle

    def submit(self, handle: int, step: DraftStep) -> None:
        """Reports committed tokens and requests a proposal; errors come as the session's reply."""
        self._thread.command(lambda: self._report(handle, step))

    def close(self, handle: int) -> None:
        """Frees everything the session holds; does nothing for an unknown session."""
        self._thread.command(lambda: self._close(handle))

    def between_rounds(self, act: Callable[[], T]) -> T:
        """Returns act(), called on the engine's thread between two batches; from any other thread."""
        return self._thread.between_rounds(act)

    # ---- on the engine's thread ----

    def _work(self) -> None:
        self._catch_up()
        self._propose()

    def _patience_s(self) -> float:
        """Seconds to wait for the last batch's other sessions: two proposals in one batch cost little more than one."""
        if not self._expected or not self._asked():
            return 0.0
        worth = min(_LONGEST_PATIENCE_S, _PATIENCE_SHARE * self._propose_s)
        return self._first_asked_at + worth - time.perf_counter()

    def _asked(self) -> list[DraftSession]:
        return [session for session in self._sessions.values() if session.step is not None]

    def _open(self, handle: int, session: DraftSession) -> None:
        self._sessions[handle] = session
        try:
            self.methods[session.spec.method].open(session)
        except Exception as error:
            self._fail(handle, session, error)
            return
        self._behind.append(handle)

    def _report(self, handle: int, step: DraftStep) -> None:
        session = self._sessions.get(handle)
        if session is None:
            return
        try:
            self._check_tokens(session.spec.method, "committed_token_ids", step.committed_token_ids)
            self._check_hidden_states(session.spec.method, step.hidden_states)
            session.report(step)
            num_hidden_rows = sum(piece.num_rows for piece in step.hidden_states)
            if max(len(step.committed_token_ids), num_hidden_rows) > LONG_REPORT:
                self._behind.append(handle)
            if session.step is not None:
                self._first_asked_at = self._first_asked_at or session.step_arrived_at
                self._expected.discard(handle)
        except OutriderError as error:
            self._fail(handle, session, error)

    def _check_tokens(self, method: str, name: str, token_ids: Sequence[int]) -> None:
        """Refuses an id without a row in the draft model: it would fail the forward of every session in the batch."""
        vocab_size = self.methods[method].info.vocab_size or _MAX_VOCAB_SIZE
        if token_ids and not (0 <= min(token_ids) and max(token_ids) < vocab_size):
            raise InvalidRequest(f"{name} has an id outside the vocabulary [0, {vocab_size})", param=name)

    def _check_hidden_states(self, method: str, pieces: Sequence[HiddenStates]) -> None:
        """Refuses rows of another model: they would fail the forward of every session in the batch."""
        info = self.methods[method].info
        for piece in pieces:
            if piece.layers != info.hidden_layers or (piece.num_rows and piece.width != info.hidden_size):
                raise InvalidRequest(
                    f"hidden_states: layers {list(piece.layers)} of width {piece.width}, {method} needs layers "
                    f"{list(info.hidden_layers)} of width {info.hidden_size}",
                    param="hidden_states",
                )

    def _close(self, handle: int) -> None:
        session = self._sessions.get(handle)
        if session is not None:
            self._expected.discard(handle)
            with self._lock:
                self._num_open -= 1
            del self._sessions[handle]  # only now: once a session is gone its slot must be free
            self.methods[session.spec.method].close(session)

    def _fail(self, handle: int, session: DraftSession, error: Exception) -> None:
        """Ends one session; the others continue."""
        if not isinstance(error, OutriderError):
            log.exception("session failed", exc_info=error)
        self._close(handle)
        session.on_reply(error)
        session.flush()

    def _catch_up(self) -> None:
        """Reads a bounded piece of one session's backlog: no proposal waits for another session's long prompt."""
        if not self._behind:
            return
        handle = self._behind.popleft()
        session = self._sessions.get(handle)
        if session is None:
            return
        try:
            if self.methods[session.spec.method].advance(session):
                self._behind.append(handle)
        except Exception as error:
            self._fail(handle, session, error)

    def _propose(self) -> None:
        behind = set(self._behind)
        self._first_asked_at = 0.0
        for name, method in self.methods.items():
            asked = {
                handle: session
                for handle, session in self._sessions.items()
                if session.step is not None and session.spec.method == name and handle not in behind
            }
            if not asked:
                continue
            started = time.perf_counter()
            try:
                proposals = method.propose(list(asked.values()))
            except Exception as error:
                for handle, session in asked.items():
                    self._fail(handle, session, error)
                continue
            ended = time.perf_counter()
            self._propose_s = ended - started
            self._expected = set(asked)
            for session, proposal in zip(asked.values(), proposals, strict=True):
                self._reply(session, proposal, len(asked), started, ended)
            for flush in {session.flush for session in asked.values()}:
                flush()

    def _reply(
        self, session: DraftSession, proposal: Proposal, num_sessions: int, started: float, ended: float
    ) -> None:
        session.step = None
        timings = Timings(
            queue_us=max(0, int((started - session.step_arrived_at) * 1e6)),
            forward_us=int((ended - started) * 1e6),
            total_us=int((time.perf_counter() - session.step_arrived_at) * 1e6),
            batch_sessions=num_sessions,
        )
        self._metrics.observe(proposal, timings)
        missing, session.missing_hidden_from = session.missing_hidden_from, None
        session.on_reply(ProposalReply(session.spec.epoch, proposal, timings, missing))
