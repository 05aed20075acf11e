"""Both sides of gateway.request.interfaces in this process, as plainly as the contracts allow, and a loop around them.

The verifier knows the text that it will say and takes of a proposal what agrees with it. The drafter keeps what it is
told in the drafter service's own DraftSession, which refuses gaps; how it answers is up to each test.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry

from outrider.drafting.session import DraftSession
from outrider.gateway.decoding.decode_loop import decode
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.proposals.ask import NO_LOCAL_METHODS, DraftPlan, LocalMethods
from outrider.gateway.proposals.drafter_connection import Lease
from outrider.gateway.proposals.drafting import Drafting
from outrider.gateway.proposals.run_ahead import AheadTrials
from outrider.gateway.request.commit_sink import CommitSink, SpeculationTally
from outrider.gateway.request.detokenizer import IncrementalDetokenizer
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ChoiceStart, GenerationUpdate
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import (
    Commit,
    DraftMethodInfo,
    DraftStep,
    FinishReason,
    HiddenStates,
    NextDraft,
    Proposal,
    ProposalReply,
    SessionSpec,
    Timings,
    TokenOrigin,
    VerifyStep,
)
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.verifier_service.session import reconcile

PROMPT = tuple(range(5, 18))
LENGTH = 60
TRUTH = tuple(20 + (7 * place) % 31 for place in range(LENGTH))
NGRAM = DraftMethodInfo("ngram")
MEDUSA = DraftMethodInfo("medusa", hidden_layers=(3,), hidden_size=1)
EAGLE = DraftMethodInfo("eagle3", hidden_layers=(1, 2), takes_hidden_history=True, hidden_size=1)


def make_spec(committed: Sequence[int] = (), epoch: int = 1) -> SessionSpec:
    params = SamplingParams(max_tokens=LENGTH)
    return SessionSpec("s", epoch, PROMPT, tuple(committed), params, SpeculationMode.EXACT, 0)


def hidden_rows(layers: tuple[int, ...], first_index: int, end: int) -> HiddenStates:
    """One element a row, which tells its layer and its output index."""
    rows = np.array([[1000 * layer + index for index in range(first_index, end)] for layer in layers], np.float32)
    return HiddenStates(first_index, layers, end - first_index, 1, "float32", rows.tobytes())


@dataclass
class PlainVerifier:
    """gateway.request.interfaces.Verifier. `max_hidden_rows` per commit; rows before `hidden_from` are lost. Asked
    for drafts of its own it guesses right, but before the first token. wants: with `auto`, what a drafter shall draft
    next, by the step that has just ended; the last one again and again. A run to the end ends where that is something.
    """

    spec: SessionSpec
    max_hidden_rows: int = 1000
    hidden_from: int = -len(PROMPT)
    forward_s: float = 0.0
    steps: list[VerifyStep] = field(default_factory=list)
    wants: tuple[NextDraft | None, ...] = (None,)
    num_ended: int = 0
    num_closed: int = 0

    async def open(self, spec: SessionSpec) -> None:
        self.spec = spec

    async def verify(self, step: VerifyStep) -> AsyncIterator[Commit]:
        self.steps.append(step)
        base_len, free_left, hidden_sent = step.base_len, step.max_new_tokens, -len(PROMPT)
        local, more = step.local_drafts, True
        wanted_next = self.wants[min(len(self.steps), len(self.wants)) - 1]
        if wanted_next is not None and free_left >= LENGTH - base_len:
            free_left = 1
        while more:
            await asyncio.sleep(self.forward_s)
            asked = local if base_len > 0 else None
            proposal = reconcile(step.proposal, base_len, list(TRUTH[:base_len])) if step.proposal else None
            drafted = proposal.token_ids if proposal is not None else ()
            wanted = TRUTH[base_len:]
            if asked is not None:
                asked = replace(asked, num_draft_tokens=min(asked.num_draft_tokens, len(wanted) - 1, free_left - 1))
                drafted = wanted[: asked.num_draft_tokens]
            num_accepted = next(
                (n for n, pair in enumerate(zip(drafted, wanted, strict=False)) if pair[0] != pair[1]),
                min(len(drafted), len(wanted)),
            )
            token_ids = wanted[: num_accepted + 1]
            end = base_len + len(token_ids)
            free_left -= len(token_ids)
            more = end < LENGTH and free_left > 0
            hidden = self._hidden(step, hidden_sent, end)
            hidden_sent = hidden.end if hidden is not None else hidden_sent
            self.num_ended += not more
            yield Commit(
                epoch=step.epoch,
                base_len=base_len,
                token_ids=token_ids,
                origins=(TokenOrigin.TARGET,) * len(token_ids),
                num_draft_tokens=len(drafted),
                num_accepted_tokens=num_accepted,
                finish_reason=FinishReason.LENGTH if end == LENGTH else None,
                timings=Timings(
                    total_us=int(self.forward_s * 1e6) + (3_000 if asked is not None else 0),
                    draft_us=2_000 if asked is not None else 0,
                ),
                hidden_states=hidden,
                more=more,
                local_drafts=asked,
                next_draft=None if more else wanted_next,
            )
            base_len = end

    def _hidden(self, step: VerifyStep, sent: int, committed_len: int) -> HiddenStates | None:
        """The last committed token has not been through the model: its row is the next step's."""
        request = step.hidden_states
        if request is None:
            return None
        start = max(request.first_index, sent, self.hidden_from)
        end = min(committed_len - 1, start + self.max_hidden_rows)
        return hidden_rows(request.layers, start, end) if start < end else None

    async def close(self) -> None:
        self.num_closed += 1


# What a drafter does before it answers a step; it may wait, raise, or give another answer.
Behave = Callable[["PlainDrafter", DraftStep], Awaitable[ProposalReply | None]]


async def behave_well(_drafter: PlainDrafter, _step: DraftStep) -> ProposalReply | None:
    return None


@dataclass
class PlainDrafter:
    """gateway.request.interfaces.Drafter; guesses right unless it is told otherwise."""

    behave: Behave = behave_well
    open_error: Exception | None = None
    advance_error: Exception | None = None
    guesses: bool = False  # it may be told tokens that are not committed in the end
    session: DraftSession | None = None
    steps: list[DraftStep] = field(default_factory=list)
    advances: list[DraftStep] = field(default_factory=list)
    num_closed: int = 0

    async def open(self, spec: SessionSpec) -> None:
        if self.open_error is not None:
            raise self.open_error
        self.session = DraftSession(spec, [*spec.prompt_token_ids, *spec.committed_token_ids], lambda _reply: None)

    async def propose(self, step: DraftStep) -> ProposalReply:
        self.steps.append(step)
        self._report(step)
        return await self.behave(self, step) or self.reply(step, TRUTH[step.committed_len :][: step.num_draft_tokens])

    async def advance(self, step: DraftStep) -> None:
        if self.advance_error is not None:
            raise self.advance_error
        self.advances.append(step)
        self._report(step)

    async def close(self) -> None:
        self.num_closed += 1

    def _report(self, step: DraftStep) -> None:
        assert self.session is not None
        assert self.num_closed == 0
        self.session.report(step)
        assert self.guesses or self.session.output_token_ids == list(TRUTH[: step.committed_len])

    def reply(self, step: DraftStep, token_ids: Sequence[int], missing: int | None = None) -> ProposalReply:
        assert self.session is not None
        proposal = Proposal(step.committed_len, tuple(token_ids), self.session.spec.method)
        return ProposalReply(step.epoch, proposal, Timings(), missing)


class NoLog:
    """Nothing is to be resumed here."""

    async def append(self, entry: LogEntry) -> None:
        return None


@dataclass
class Choice:
    """One choice as gateway.decoding.generation runs it: the real loop, drafting and sink between the two plain sides.

    `offers`: the drafter given at each acquire, None for nobody, the last one again when all have been given.
    """

    tokenizer: Tokenizer
    offers: list[PlainDrafter | None]
    # Without a method: that of `method`.
    plan: DraftPlan | None = field(default_factory=lambda: DraftPlan("", 4))
    method: DraftMethodInfo = NGRAM
    spec: SessionSpec = field(default_factory=make_spec)
    timeout_s: float = 5.0
    max_queued_commits: int = 100
    read_delay_s: float = 0.0
    trials: AheadTrials | None = None
    local: LocalMethods = NO_LOCAL_METHODS
    num_acquired: int = 0
    wanted_methods: list[str] = field(default_factory=list)
    num_released: int = 0
    seconds: float = 0.0
    metrics: GatewayMetrics = field(default_factory=lambda: GatewayMetrics(CollectorRegistry()))
    output: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.verifier = PlainVerifier(self.spec)
        if self.plan is not None and not self.plan.method:
            self.plan = replace(self.plan, method=self.method.name)

    async def until_late(self) -> None:
        """Returns once a proposal has come too late; the counter has no event."""
        while self.count("draft_timeouts") == 0:  # noqa: ASYNC110
            await asyncio.sleep(0.002)

    @property
    def drafters(self) -> list[PlainDrafter]:
        return [offer for offer in self.offers if offer is not None]

    def count(self, name: str) -> float:
        return float(getattr(self.metrics, name)._value.get())

    def acquire(self, method: str) -> Lease | None:
        self.wanted_methods.append(method)
        offer = self.offers[min(self.num_acquired, len(self.offers) - 1)]
        self.num_acquired += 1
        return Lease(offer, self.method, self._release) if offer is not None else None

    def _release(self) -> None:
        self.num_released += 1

    def drafting(self, committed: Sequence[int]) -> Drafting:
        return Drafting(
            self.spec,
            committed,
            self.acquire,
            self.plan,
            timeout_s=self.timeout_s,
            metrics=self.metrics,
            local=self.local,
            trials=self.trials,
        )

    async def run(self) -> tuple[int, ...]:
        """Decodes to the end; the tokens that came out. Everything is closed, also when it is cancelled."""
        updates: asyncio.Queue[Any] = asyncio.Queue(1)
        sink = CommitSink(
            ChoiceStart(0, SpeculationMode.EXACT, 0, NoLog()),
            detokenizer=IncrementalDetokenizer(self.tokenizer, PROMPT),
            tally=SpeculationTally(4),
            updates=updates,
            max_queued_commits=self.max_queued_commits,
        )
        sink.committed_token_ids.extend(self.spec.committed_token_ids)
        reader = asyncio.create_task(self._read(updates))
        drafting = self.drafting(sink.committed_token_ids)
        started = time.perf_counter()
        try:
            await self.verifier.open(self.spec)
            await decode(self.spec, self.verifier, drafting, sink)
            await asyncio.sleep(0)  # the reader's turn
        finally:
            self.seconds = time.perf_counter() - started
            reader.cancel()
            await self.verifier.close()
            await drafting.close()
            await sink.close()
        return tuple(self.output)

    async def _read(self, updates: asyncio.Queue[GenerationUpdate]) -> None:
        while True:
            await asyncio.sleep(self.read_delay_s)
            self.output.extend((await updates.get()).token_ids)


def maker(tokenizer: Tokenizer, kind: Callable[..., Any] = Choice, **settings: Any) -> Callable[..., Any]:
    """Makes choices of the drafters that it is called with, in the order in which they are offered."""
    return lambda *offers, **more: kind(tokenizer, list(offers), **settings, **more)


def resumed(choice: Choice, num_committed: int) -> Choice:
    """The same choice, taken up after so many tokens."""
    return replace(choice, spec=make_spec(TRUTH[:num_committed]))
