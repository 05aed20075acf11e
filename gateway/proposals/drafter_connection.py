"""A session's connection to its drafter: the prefix it has been sent and the answer still outstanding.

Tokens are sent by absolute index and overwrite those sent before, so a guess may be sent. Not here: which drafter
(fleet/drafter_choice), and how many draft tokens (verifier_service/draft_length).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.proposals.hidden_flow import HiddenFlow
from outrider.gateway.request.interfaces import Drafter
from outrider.gateway.request.types import SessionTrace
from outrider.shared.messages import DraftMethodInfo, DraftStep, Proposal, ProposalReply, SessionSpec


class Lease:
    """A session slot at a drafter; `release` frees it. address: "" offline."""

    def __init__(
        self, drafter: Drafter, method: DraftMethodInfo, release: Callable[[], None], address: str = ""
    ) -> None:
        self.drafter = drafter
        self.method = method
        self.release = release
        self.address = address


@dataclass(frozen=True)
class ConnectionOptions:
    """token_tree: whether to ask for trees. timeout_s: longest time for an answer."""

    token_tree: bool
    timeout_s: float
    metrics: GatewayMetrics
    trace: SessionTrace | None = None


@dataclass
class PendingProposal:
    """A requested proposal. assumed: tokens before it, uncommitted at asked_at. Times: perf_counter seconds."""

    task: asyncio.Task[ProposalReply]
    step: DraftStep
    asked_at: float
    assumed: tuple[int, ...] = ()
    answered_at: float | None = None
    is_overdue: bool = False  # counted as a timeout

    @classmethod
    def ask(cls, drafter: Drafter, step: DraftStep, assumed: tuple[int, ...] = ()) -> PendingProposal:
        pending = cls(asyncio.create_task(drafter.propose(step)), step, time.perf_counter(), assumed)
        pending.task.add_done_callback(pending._answered)
        return pending

    @property
    def base_len(self) -> int:
        """Output index of the proposal's first token."""
        return self.step.committed_len

    @property
    def took_s(self) -> float:
        """Seconds until the answer came, or until now."""
        return (self.answered_at or time.perf_counter()) - self.asked_at

    def holds(self, committed: Sequence[int]) -> bool:
        """Returns whether the assumed tokens are exactly what was committed."""
        assumed_from = self.base_len - len(self.assumed)
        return len(committed) == self.base_len and tuple(committed[assumed_from:]) == self.assumed

    async def answer_within(self, seconds: float) -> bool:
        """Waits for at most `seconds`; returns whether the answer is there. Cancelling it cancels the request."""
        try:
            await asyncio.wait({self.task}, timeout=seconds)
        except asyncio.CancelledError:
            self.task.cancel()
            raise
        return self.task.done()

    async def give_up(self) -> None:
        """Cancels the request."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def _answered(self, _task: asyncio.Task[ProposalReply]) -> None:
        self.answered_at = time.perf_counter()


class DrafterConnection:
    """A session's connection to its drafter. committed: the session's growing output.

    `open` comes first. All methods but `close` raise OutriderError when the drafter is lost; then only `close` may be
    called.
    """

    def __init__(self, lease: Lease, spec: SessionSpec, committed: Sequence[int], options: ConnectionOptions) -> None:
        self.lease = lease
        self.hidden = HiddenFlow(lease.method, len(spec.prompt_token_ids))
        # Consecutive answers beyond timeout_s.
        self.num_timeouts = 0
        self._committed = committed
        self._spec = dataclasses.replace(spec, method=lease.method.name, committed_token_ids=tuple(committed))
        self._options = options
        self._sent_len = len(committed)
        self._late: PendingProposal | None = None
        self._ahead: PendingProposal | None = None

    @property
    def is_late(self) -> bool:
        """True if a late answer is outstanding."""
        return self._late is not None

    async def open(self) -> None:
        """Raises TimeoutError too."""
        async with asyncio.timeout(self._options.timeout_s):
            await self.lease.drafter.open(self._spec)

    async def has_hidden_states(self, committed_len: int) -> bool:
        """Returns whether the drafter can be asked. If not, sends the rows received so far: those of a long prompt come
        in parts.
        Raises TimeoutError too.
        """
        if self.hidden.has_all(committed_len):
            return True
        async with asyncio.timeout(self._options.timeout_s):
            await self.lease.drafter.advance(self._step(committed_len, 0))
        self._sent_len = committed_len
        return False

    async def ask(
        self, committed_len: int, num_draft_tokens: int, patience_s: float, *, one_more: bool
    ) -> ProposalReply | None:
        """Returns the answer; None if it takes over patience_s. one_more: also asks for a guess of the bonus token."""
        pending, self._ahead = self._ahead, None
        if pending is not None:
            holds = pending.holds(self._committed)
            self._options.metrics.observe_ahead(used=holds)
            if not holds:
                await pending.give_up()
                pending = None
        if pending is None:
            pending = PendingProposal.ask(self.lease.drafter, self._step(committed_len, num_draft_tokens + one_more))
        self._sent_len = committed_len
        if not await pending.answer_within(min(patience_s, self._options.timeout_s)):
            self._late = pending
            self._watch(pending)
            return None
        self.num_timeouts = 0
        return await self._reply_to(pending)

    def can_ask_ahead(self, num_draft_tokens: int) -> bool:
        """Returns whether the request ahead fits the drafter's limits and needs no hidden states."""
        method = self.lease.method
        length = len(self._spec.prompt_token_ids) + len(self._committed) + 2 * (num_draft_tokens + 1)
        fits = length < (method.max_model_len or math.inf)
        return fits and num_draft_tokens < (method.max_num_draft_tokens or math.inf) and not method.hidden_layers

    def ask_ahead(self, assumed: tuple[int, ...], base_len: int, num_draft_tokens: int) -> None:
        """Requests the proposal after `assumed`, uncommitted tokens from output index base_len on."""
        step = dataclasses.replace(
            self._step(base_len, num_draft_tokens + 1), base_len=base_len, committed_token_ids=assumed
        )
        self._ahead = PendingProposal.ask(self.lease.drafter, step, assumed)

    async def drop_late(self) -> None:
        """Drops the late answer if it has come."""
        late = self._late
        if late is not None and not late.task.done():
            self._watch(late)
        elif late is not None:
            self._late = None
            await self._reply_to(late)

    async def close(self) -> None:
        """Frees the session slot first, so that cancelling this cannot leak it."""
        unanswered = [pending for pending in (self._late, self._ahead) if pending is not None]
        self._late = self._ahead = None
        self.lease.release()
        for pending in unanswered:
            pending.task.cancel()
        await asyncio.shield(_end(self.lease.drafter, unanswered))

    def _step(self, committed_len: int, num_draft_tokens: int) -> DraftStep:
        """Reports the tokens committed and the hidden states received since the last step."""
        return DraftStep(
            epoch=self._spec.epoch,
            base_len=self._sent_len,
            committed_token_ids=tuple(self._committed[self._sent_len : committed_len]),
            num_draft_tokens=num_draft_tokens,
            hidden_states=self.hidden.hand_over(),
            max_tree_nodes=num_draft_tokens if self._options.token_tree else 0,
        )

    def _watch(self, late: PendingProposal) -> None:
        """Counts an answer beyond timeout_s, once."""
        if late.is_overdue or late.took_s < self._options.timeout_s:
            return
        late.is_overdue = True
        self.num_timeouts += 1
        self._options.metrics.draft_timeouts.inc()
        if self._options.trace is not None:
            self._options.trace.add_event("draft_timeout")

    async def _reply_to(self, pending: PendingProposal) -> ProposalReply:
        reply = await pending.task
        self.hidden.rewind(reply.missing_hidden_from)
        return reply


def guess_after(proposal: Proposal, num_draft_tokens: int) -> tuple[Proposal, tuple[int, ...]]:
    """Cuts the proposal to num_draft_tokens. Also returns its tokens with a chain's guess of the bonus token."""
    if proposal.parents or len(proposal.token_ids) <= num_draft_tokens:
        return proposal, ()
    cut = dataclasses.replace(
        proposal,
        token_ids=proposal.token_ids[:num_draft_tokens],
        laws=proposal.laws[:num_draft_tokens],
        confidence=proposal.confidence[:num_draft_tokens],
    )
    return cut, proposal.token_ids[: num_draft_tokens + 1]


async def _end(drafter: Drafter, unanswered: Sequence[PendingProposal]) -> None:
    await asyncio.gather(*(pending.task for pending in unanswered), return_exceptions=True)
    await drafter.close()
