"""The verifier's rounds: plan rows -> one forward -> decide each session's tokens -> reply.

Not here: which sessions there are, and the thread (engine), which rows form a batch (scheduler), which tokens are
accepted (round).
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.predicted import with_predictions
from outrider.drafting.serving.combined import CombinedMethod, with_lookups
from outrider.drafting.serving.versions import VersionedMethod
from outrider.engine.attention.batch import build_batch
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.attention.hidden_store import HiddenStateStore
from outrider.engine.model.loaded import LoadedModel
from outrider.engine.recurrent.table import StateTable
from outrider.engine.run.runner import ModelRunner
from outrider.shared.errors import OutriderError
from outrider.shared.messages import VerifyStep
from outrider.verifier_service.admission import check_proposal
from outrider.verifier_service.auto_drafting import AutoDrafting
from outrider.verifier_service.hidden_states import keep_layers, read_rows, rows_to_send
from outrider.verifier_service.host_sampling import drawn_outputs
from outrider.verifier_service.local_drafting import LocalDrafting
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.round import ForwardTimes, decide
from outrider.verifier_service.row_outputs import RowOutputs
from outrider.verifier_service.rows import keep_prompt_logprobs, path_moves, session_rows
from outrider.verifier_service.scheduler import Scheduler, Work
from outrider.verifier_service.session import VerifierSession
from outrider.verifier_service.timing.context_costs import Contexts
from outrider.verifier_service.timing.gathering import BatchGathering
from outrider.verifier_service.timing.mask_turns import MaskTurns
from outrider.verifier_service.timing.prompt_allowance import PromptAllowance
from outrider.verifier_service.timing.reply_queue import ReplyQueue
from outrider.verifier_service.timing.step_costs import StepCosts

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineLimits:
    max_num_seqs: int
    max_num_batched_tokens: int
    prefill_chunk_size: int
    max_model_len: int
    rejection_sample_method: str = "block"
    # Objective for the time between two commits of a session that has asked for more; inf: none.
    slo_itl_s: float = math.inf


class Rounds:
    """The target's forwards, and what each leaves in its sessions. Belongs to the engine's thread.

    A step is `begin`, then as many `run` as it needs; `release` ends a session's part in both.
    """

    def __init__(
        self,
        runner: ModelRunner,
        blocks: BlockManager,
        limits: EngineLimits,
        metrics: VerifierMetrics,
        costs: StepCosts,
        local_methods: Mapping[str, DraftMethod],
    ) -> None:
        loaded = runner.loaded
        self.runner = runner
        self._blocks, self._limits, self._metrics = blocks, limits, metrics
        self._hidden = HiddenStateStore(
            num_slots=blocks.num_blocks * blocks.block_size,
            width=loaded.hidden_size,
            dtype=loaded.dtype,
            device=loaded.device,
        )
        for method in local_methods.values():
            self.keep_layers(method.info.hidden_layers)
        self.scheduler = Scheduler(
            blocks, limits.max_num_batched_tokens, limits.prefill_chunk_size, limits.max_model_len
        )
        if runner.states is not None:
            self.scheduler.states = StateTable(runner.states.num_slots)
            self.scheduler.most_draft_tokens = runner.states.num_log_rows - 1
        self._prompts: PromptAllowance | None = None
        if not math.isinf(limits.slo_itl_s):
            self._prompts = PromptAllowance(limits.slo_itl_s, costs, limits.max_num_batched_tokens)
            self.scheduler.rows_while_decoding = self._prompts.num_rows
        self._gathering = BatchGathering(costs)
        self._mask_turns = MaskTurns()
        self.outputs = _row_outputs(loaded)
        self.replies = ReplyQueue()
        drafted_with = with_lookups(local_methods)
        self.local = LocalDrafting(
            with_predictions(drafted_with),
            limits.max_model_len,
            self.read_rows,
            before_reading=self.replies.send,
            versions={
                name: method
                for name, method in drafted_with.items()
                if isinstance(method, VersionedMethod | CombinedMethod)
            },
        )
        infos = {name: method.info for name, method in self.local.methods.items()}
        self._auto = AutoDrafting(costs, infos, limits.max_model_len)

    @property
    def round_us(self) -> tuple[int, ...]:
        """VerifierInfo.round_us; from means that the engine's thread may be updating, each by a small step."""
        return self._gathering.served.round_us(self._limits.max_num_seqs)

    def keep_layers(self, layers: Sequence[int]) -> None:
        """Stores the hidden states of these layers from the next forward on. Raises InvalidRequest."""
        keep_layers(self._hidden, layers, self.runner.loaded.num_layers)

    def read_rows(
        self, sessions: Sequence[tuple[VerifierSession, int]], layers: tuple[int, ...]
    ) -> list[tuple[int, torch.Tensor]]:
        return read_rows(sessions, self._hidden, self._blocks.block_size, layers)

    def patience_s(self, sessions: Collection[VerifierSession]) -> float:
        """Seconds that the next forward should wait for further steps; then all replies leave."""
        patience_s = self._gathering.patience_s(sessions)
        if patience_s > 0.0:
            self.replies.send()
        return patience_s

    def begin(self, session: VerifierSession, step: VerifyStep, arrived: float) -> None:
        """Begins a session's step; what is wrong with it is the session's reply."""
        try:
            session.begin(step)
            session.step_arrived_at = arrived
            self._gathering.asked(session, arrived)
            if step.proposal is not None:
                check_proposal(step.proposal, self.runner.loaded.vocab_size)
            if step.hidden_states is not None:
                self.keep_layers(step.hidden_states.layers)
            self.scheduler.cut_back(session, step.base_len)
            self.local.cut_back(session, step.base_len)
        except OutriderError as error:
            session.step = None
            self.replies.fail(session, error)

    def fail(self, session: VerifierSession, error: Exception) -> None:
        """Ends one session's step with an error and frees its blocks; the others continue."""
        if not isinstance(error, OutriderError):
            log.error("a session failed", exc_info=error)
        session.step = None
        self.scheduler.release(session)
        self.replies.fail(session, error)

    def release(self, session: VerifierSession) -> None:
        self.scheduler.release(session)
        self.local.close(session)

    def swap_runner(self, runner: ModelRunner) -> None:
        """Computes with other weights from now on; of the ones before nothing is kept."""
        self.scheduler.forget()
        self.runner.close()
        self.runner = runner

    def run(self, sessions: Collection[VerifierSession]) -> None:
        """One round of all sessions that wait for tokens."""
        self._mask_turns.choose(sessions)
        self._auto.decide(sessions)
        draft_s = self.local.draft(sessions)
        self._metrics.observe_drafting(draft_s)
        plan = self.scheduler.plan(list(sessions))
        if not plan:
            self._mask_turns.observe(plan, math.inf)
            self.replies.send()
            return
        contexts = Contexts.of(plan)
        prompts = [work.num_rows for work in plan if work.num_chain_rows > 1]
        num_open, num_decoding = len(sessions), len(plan) - len(prompts)
        batch = build_batch([session_rows(work) for work in plan], self._blocks.block_size)
        started = time.perf_counter()
        result = self.runner.forward(batch, self._hidden.layers, on_start=self.replies.send)
        self._hidden.write(result.hidden, batch.slot_mapping)
        outputs = self.outputs(plan, result.logits)
        times = ForwardTimes(
            started,
            time.perf_counter(),
            len(plan),
            num_open,
            self._gathering.prompts_s(num_decoding, sum(prompts)),
            self._auto.plain_round_s,
        )
        if self._prompts is not None and prompts:
            self._prompts.read_prompts(times.ended)
        num_tokens = 0
        for work, rows in zip(plan, outputs, strict=True):
            try:
                num_tokens += self._settle(work, rows, times)
            except Exception as error:
                self.fail(work.session, error)
        self._mask_turns.observe(plan, times.ended - times.started)
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
        self._metrics.observe_forward(plan, times, self.scheduler.num_preemptions, num_tokens)

    def _settle(self, work: Work, outputs: RowOutputs, times: ForwardTimes) -> int:
        """Applies the forward to one session; returns the number of tokens that it commits."""
        session = work.session
        keep_prompt_logprobs(work, outputs.logits)
        if not work.samples:
            self.scheduler.settle(work)
            return 0
        num_nodes = len(work.proposal.token_ids) if work.proposal else 0
        next_draft = self._auto.next_draft(session)
        outcome = decide(work, outputs.last(num_nodes + 1), self._limits.max_model_len, times, next_draft)
        commit = outcome.commit
        self._auto.committed(session, commit)
        self.local.committed(session, commit.num_accepted_tokens)
        self._compact(work, outcome.kept_nodes)
        self.scheduler.settle(work, outcome.kept_nodes, commit.token_ids)
        hidden = rows_to_send(session, self._hidden, self._blocks.block_size)
        if self._prompts is not None and session.committed_at is not None:
            self._prompts.committed(session.committed_at, session.step_arrived_at, times.ended)
        session.end_round(commit, times.ended)
        if session.step is None and not session.finished:
            self._gathering.replied(session, time.perf_counter())
        self._metrics.observe_commit(commit)
        self.replies.put(session, commit if hidden is None else dataclasses.replace(commit, hidden_states=hidden))
        if not commit.more:  # the session's next round waits for it
            self.replies.send()
        return len(commit.token_ids)

    def _compact(self, work: Work, kept_nodes: Sequence[int]) -> None:
        sources, targets = path_moves(work, kept_nodes, self._blocks.block_size)
        if sources:
            self.runner.cache.move(torch.tensor(sources), torch.tensor(targets))
            self._hidden.move(torch.tensor(sources), torch.tensor(targets))


def _row_outputs(loaded: LoadedModel) -> Callable[[Sequence[Work], torch.Tensor], list[RowOutputs]]:
    """Returns drawn_outputs or device_outputs, by the model's device."""
    if loaded.attention_ops.row_backend != "triton":
        return drawn_outputs
    from outrider.verifier_service.device_sampling import device_outputs  # triton is installed on GPU machines only

    return device_outputs
