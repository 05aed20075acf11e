"""The verifier's engine: one thread that owns the target model, its KV cache and every session.

    take commands -> plan rows -> one forward -> decide each session's tokens -> reply -> repeat

Not here: gRPC (server), which rows form a batch (scheduler), which tokens are accepted (round).
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.predicted import with_predictions
from outrider.drafting.serving.combined import CombinedMethod, with_lookups
from outrider.drafting.serving.versions import VersionedMethod
from outrider.engine.attention.batch import build_batch
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.attention.hidden_store import HiddenStateStore
from outrider.engine.certificate import Certificate
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.table import StateTable
from outrider.engine.run.runner import ModelRunner
from outrider.engine.sampling.grammar import GrammarCompiler, GrammarState
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.shared.engine_thread import EngineThread
from outrider.shared.errors import OutriderError, Overloaded, TargetReplaced
from outrider.shared.messages import DraftMethodInfo, SessionSpec, VerifyStep
from outrider.verifier_service.admission import check_proposal, check_spec, check_start
from outrider.verifier_service.auto_drafting import AutoDrafting
from outrider.verifier_service.hidden_states import keep_layers, read_rows, rows_to_send
from outrider.verifier_service.host_sampling import drawn_outputs
from outrider.verifier_service.local_drafting import LocalDrafting
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.round import ForwardTimes, decide
from outrider.verifier_service.row_outputs import RowOutputs
from outrider.verifier_service.rows import keep_prompt_logprobs, path_moves, session_rows
from outrider.verifier_service.scheduler import Scheduler, Work
from outrider.verifier_service.session import OnReply, VerifierSession
from outrider.verifier_service.timing.context_costs import Contexts
from outrider.verifier_service.timing.gathering import BatchGathering
from outrider.verifier_service.timing.mask_turns import MaskTurns
from outrider.verifier_service.timing.prompt_allowance import PromptAllowance
from outrider.verifier_service.timing.reply_queue import ReplyQueue
from outrider.verifier_service.timing.step_costs import StepCosts

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class EngineLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int
    rejection_sample_method: str = "block"
    # Objective for the time between two commits of a session that has asked for more; inf: none.
    slo_itl_s: float = math.inf


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
        self._runner = runner
        self.draft_methods = dict(local_methods or {})
        self._grammars = GrammarCompiler(loaded.path, loaded.vocab_size, loaded.eos_token_ids)
        self.blocks = blocks
        self._hidden = HiddenStateStore(
            num_slots=blocks.num_blocks * blocks.block_size,
            width=loaded.hidden_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        for method in self.draft_methods.values():
            keep_layers(self._hidden, method.info.hidden_layers, loaded.num_layers)
        self.limits = limits
        self.certificate = certificate
        self.metrics = metrics
        self._scheduler = Scheduler(
            blocks, limits.max_num_batched_tokens, limits.prefill_chunk_size, limits.max_model_len
        )
        if runner.states is not None:
            self._scheduler.states = StateTable(runner.states.num_slots)
            self._scheduler.most_draft_tokens = runner.states.num_log_rows - 1
        self._prompts: PromptAllowance | None = None
        if not math.isinf(limits.slo_itl_s):
            self._prompts = PromptAllowance(limits.slo_itl_s, step_costs, limits.max_num_batched_tokens)
            self._scheduler.rows_while_decoding = self._prompts.num_rows
        self._sessions: dict[int, VerifierSession] = {}
        # Counted in `open`: the engine's thread may be many sessions behind.
        self._num_open = 0
        self._num_tokens = 0
        self._handles = itertools.count()
        self._lock = threading.Lock()
        self._gathering = BatchGathering(step_costs)
        self._mask_turns = MaskTurns()
        self._outputs = _row_outputs(loaded)
        self._replies = ReplyQueue()
        drafted_with = with_lookups(self.draft_methods)
        self._local = LocalDrafting(
            with_predictions(drafted_with),
            limits.max_model_len,
            self.read_rows,
            before_reading=self._replies.send,
            versions={
                name: method
                for name, method in drafted_with.items()
                if isinstance(method, VersionedMethod | CombinedMethod)
            },
        )
        infos = {name: method.info for name, method in self._local.methods.items()}
        self._auto = AutoDrafting(step_costs, infos, limits.max_model_len)
        # Called with each session that ends, while it has its KV blocks.
        self._on_end: list[Callable[[VerifierSession], None]] = []
        # Of the target's weights; written on the engine's thread.
        self.target_version = 1
        self._thread = EngineThread(
            "verifier-engine",
            has_work=self._has_work,
            work=self._work,
            patience_s=self._patience_s,
        )

    @property
    def loaded(self) -> LoadedModel:
        return self._runner.loaded

    @property
    def states(self) -> StateTable | None:
        return self._scheduler.states

    @property
    def num_sessions(self) -> int:
        return len(self._sessions)

    @property
    def num_waiting(self) -> int:
        return sum(session.step is not None for session in list(self._sessions.values()))

    @property
    def round_us(self) -> tuple[int, ...]:
        """VerifierInfo.round_us; from means that the engine's thread may be updating, each by a small step."""
        return self._gathering.served.round_us(self.limits.max_num_seqs)

    @property
    def local_methods(self) -> tuple[DraftMethodInfo, ...]:
        return tuple(method.info for method in self._local.methods.values())

    def when_sessions_end(self, take: Callable[[VerifierSession], None], layers: tuple[int, ...]) -> None:
        """Gives `take` each session that ends, on the engine's thread, while it has its KV blocks.

        layers: hidden states that it reads by `read_rows`. Call it before `start`.
        """
        keep_layers(self._hidden, layers, self._runner.loaded.num_layers)
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
        loaded = self._runner.loaded
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
        self.between_rounds(self._scheduler.check_integrity)

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
            self._replies.fail(session, TargetReplaced("the target's weights were replaced while the session ran"))
        self._scheduler.forget()
        self._runner.close()
        self._runner = runner
        self.certificate = certificate
        self.metrics.observe_certificate(certificate.holds)
        self.target_version += 1
        return self.target_version

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    def _register(self, handle: int, session: VerifierSession, target_version: int) -> None:
        self._sessions[handle] = session
        if target_version != self.target_version:
            self._close(handle)
            self._replies.fail(session, TargetReplaced("the target's weights were replaced before the session began"))

    def _work(self) -> None:
        try:
            self._step()
        except Exception as error:
            self._fail_waiting(error)

    def _has_work(self) -> bool:
        return any(session.step is not None for session in self._sessions.values())

    def _patience_s(self) -> float:
        patience_s = self._gathering.patience_s(self._sessions.values())
        if patience_s > 0.0:
            self._replies.send()
        return patience_s

    def _begin(self, handle: int, step: VerifyStep, arrived: float) -> None:
        session = self._sessions.get(handle)
        if session is None:
            return
        try:
            session.begin(step)
            session.step_arrived_at = arrived
            self._gathering.asked(session, arrived)
            if step.proposal is not None:
                check_proposal(step.proposal, self._runner.loaded.vocab_size)
            if step.hidden_states is not None:
                keep_layers(self._hidden, step.hidden_states.layers, self._runner.loaded.num_layers)
            self._scheduler.cut_back(session, step.base_len)
            self._local.cut_back(session, step.base_len)
        except OutriderError as error:
            session.step = None
            self._replies.fail(session, error)

    def _close(self, handle: int) -> None:
        session = self._sessions.pop(handle, None)
        if session is not None:
            with self._lock:
                self._num_open -= 1
            try:
                for take in self._on_end:
                    take(session)
            finally:
                self._scheduler.release(session)
                self._local.close(session)

    def _fail_waiting(self, error: Exception) -> None:
        for session in list(self._sessions.values()):
            if session.step is not None:
                self._fail(session, error)

    def _fail(self, session: VerifierSession, error: Exception) -> None:
        """Ends one session's step with an error and frees its blocks; the others continue."""
        if not isinstance(error, OutriderError):
            log.error("a session failed", exc_info=error)
        session.step = None
        self._scheduler.release(session)
        self._replies.fail(session, error)

    def _step(self) -> None:
        self._mask_turns.choose(self._sessions.values())
        self._auto.decide(self._sessions.values())
        draft_s = self._local.draft(self._sessions.values())
        self.metrics.observe_drafting(draft_s)
        plan = self._scheduler.plan(list(self._sessions.values()))
        if not plan:
            self._mask_turns.observe(plan, math.inf)
            self._replies.send()
            return
        contexts = Contexts.of(plan)
        prompts = [work.num_rows for work in plan if work.num_chain_rows > 1]
        num_decoding = len(plan) - len(prompts)
        batch = build_batch([session_rows(work) for work in plan], self.blocks.block_size)
        started = time.perf_counter()
        result = self._runner.forward(batch, self._hidden.layers, on_start=self._replies.send)
        self._hidden.write(result.hidden, batch.slot_mapping)
        outputs = self._outputs(plan, result.logits)
        times = ForwardTimes(
            started,
            time.perf_counter(),
            len(plan),
            len(self._sessions),
            self._gathering.prompts_s(num_decoding, sum(prompts)),
            self._auto.plain_round_s,
        )
        if self._prompts is not None and prompts:
            self._prompts.read_prompts(times.ended)
        num_tokens_before, num_open = self._num_tokens, len(self._sessions)
        for work, rows in zip(plan, outputs, strict=True):
            try:
                self._settle(work, rows, times)
            except Exception as error:
                self._fail(work.session, error)
        self._mask_turns.observe(plan, times.ended - times.started)
        num_tokens = self._num_tokens - num_tokens_before
        self._gathering.observe(
            plan,
            num_tokens,
            times.started,
            times.ended,
            contexts,
            num_open=num_open,
            draft_s=draft_s + self._auto.waited_s,
        )
        self._auto.observe(num_decoding, num_open, self._gathering.last_round, draft_s)
        self.metrics.observe_forward(plan, times, self._scheduler.num_preemptions, num_tokens)

    def _settle(self, work: Work, outputs: RowOutputs, times: ForwardTimes) -> None:
        session = work.session
        keep_prompt_logprobs(work, outputs.logits)
        if not work.samples:
            self._scheduler.settle(work)
            return
        num_nodes = len(work.proposal.token_ids) if work.proposal else 0
        next_draft = self._auto.next_draft(session)
        outcome = decide(work, outputs.last(num_nodes + 1), self.limits.max_model_len, times, next_draft)
        commit = outcome.commit
        self._auto.committed(session, commit)
        self._local.committed(session, commit.num_accepted_tokens)
        self._compact(work, outcome.kept_nodes)
        self._scheduler.settle(work, outcome.kept_nodes, commit.token_ids)
        hidden = rows_to_send(session, self._hidden, self.blocks.block_size)
        if self._prompts is not None and session.committed_at is not None:
            self._prompts.committed(session.committed_at, session.step_arrived_at, times.ended)
        session.end_round(commit, times.ended)
        if session.step is None and not session.finished:
            self._gathering.replied(session, time.perf_counter())
        self._num_tokens += len(commit.token_ids)
        self.metrics.observe_commit(commit)
        self._replies.put(session, commit if hidden is None else dataclasses.replace(commit, hidden_states=hidden))
        if not commit.more:  # the session's next round waits for it
            self._replies.send()

    def _compact(self, work: Work, kept_nodes: Sequence[int]) -> None:
        sources, targets = path_moves(work, kept_nodes, self.blocks.block_size)
        if sources:
            self._runner.cache.move(torch.tensor(sources), torch.tensor(targets))
            self._hidden.move(torch.tensor(sources), torch.tensor(targets))

    def read_rows(
        self, sessions: Sequence[tuple[VerifierSession, int]], layers: tuple[int, ...]
    ) -> list[tuple[int, torch.Tensor]]:
        return read_rows(sessions, self._hidden, self.blocks.block_size, layers)


def _row_outputs(loaded: LoadedModel) -> Callable[[Sequence[Work], torch.Tensor], list[RowOutputs]]:
    """Returns drawn_outputs or device_outputs, by the model's device."""
    if loaded.attention_ops.row_backend != "triton":
        return drawn_outputs
    from outrider.verifier_service.device_sampling import device_outputs  # triton is installed on GPU machines only

    return device_outputs
