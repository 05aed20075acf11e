"""A session's line to the drafter that it has a place at: what it has been told, and what it still owes.

What is told again by absolute index overwrites what was told before, so the drafter may be told a guess. Not here:
which drafter (drafter_choice), and how many tokens are asked for (draft_policy).
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway.draft_policy import LateAnswer
from gateway.hidden_flow import HiddenFlow
from gateway.interfaces import Drafter
from gateway.metrics import GatewayMetrics
from gateway.question import Question
from gateway.tracing import SessionTrace
from shared.messages import DraftMethodInfo, DraftStep, Proposal, ProposalReply, SessionSpec

# Tokens that a drafter has to read first, beyond which an answer takes it longer than usual.
CATCH_UP_TOKENS = 24


class Lease:
    """A drafter chosen for a session; `release` gives its place back. `address` is "" offline."""

    def __init__(
        self, drafter: Drafter, method: DraftMethodInfo, release: Callable[[], None], address: str = ""
    ) -> None:
        self.drafter = drafter
        self.method = method
        self.release = release
        self.address = address


@dataclass(frozen=True)
class LineOptions:
    """token_tree: trees are asked for. timeout_s: an answer that takes longer is a fault of the drafter's."""

    token_tree: bool
    timeout_s: float
    metrics: GatewayMetrics
    trace: SessionTrace | None = None


class DrafterLine:
    """From `open` on; `committed` is the session's growing output. All but `close` raise OutriderError when the drafter
    is lost; then nothing but `close` may be called."""

    def __init__(self, lease: Lease, spec: SessionSpec, committed: Sequence[int], options: LineOptions) -> None:
        self.lease = lease
        self.hidden = HiddenFlow(lease.method, len(spec.prompt_token_ids))
        # Answers that took longer than timeout_s, since the last one that came in time.
        self.num_timeouts = 0
        self._committed = committed
        self._spec = dataclasses.replace(spec, method=lease.method.name, committed_token_ids=tuple(committed))
        self._options = options
        # Whether the last question was one before which the drafter had to read the prompt, or much of the output.
        self.is_catch_up = False
        self._told_len = len(committed)
        # Tokens that it was told without a question; before the first one it has a prompt to read and much to set up.
        self._num_unread = math.inf
        self._late: Question | None = None
        self._ahead: Question | None = None

    @property
    def is_late(self) -> bool:
        """Whether an answer is still owed that nobody waits for any more."""
        return self._late is not None

    async def open(self) -> None:
        """Raises TimeoutError too."""
        async with asyncio.timeout(self._options.timeout_s):
            await self.lease.drafter.open(self._spec)

    async def has_hidden_states(self, committed_len: int) -> bool:
        """Whether the drafter can be asked; if not, it is sent what has come so far (a long prompt comes in parts).

        Raises TimeoutError too.
        """
        if self.hidden.has_all(committed_len):
            return True
        async with asyncio.timeout(self._options.timeout_s):
            await self.lease.drafter.advance(self._step(committed_len, 0))
        self._num_unread += committed_len - self._told_len
        self._told_len = committed_len
        return False

    async def ask(
        self, committed_len: int, num_draft_tokens: int, patience_s: float, *, one_more: bool
    ) -> ProposalReply | None:
        """The answer, if it came within patience_s, or None: it is late. one_more: a token, the guess of the bonus."""
        question, self._ahead = self._ahead, None
        if question is not None:
            holds = question.holds(self._committed)
            self._options.metrics.observe_ahead(used=holds)
            if not holds:
                await question.give_up()
                question = None
        if question is None:
            question = Question.ask(self.lease.drafter, self._step(committed_len, num_draft_tokens + one_more))
        self.is_catch_up = self._num_unread + committed_len - self._told_len > CATCH_UP_TOKENS
        self._told_len, self._num_unread = committed_len, 0
        if not await question.answer_within(min(patience_s, self._options.timeout_s)):
            self._late = question
            self._watch(question)
            return None
        self.num_timeouts = 0
        return await self._reply_to(question)

    def can_ask_ahead(self, num_draft_tokens: int) -> bool:
        """Whether what would be assumed and asked for is within what the drafter takes, and tokens are all it needs."""
        method = self.lease.method
        length = len(self._spec.prompt_token_ids) + len(self._committed) + 2 * (num_draft_tokens + 1)
        fits = length < (method.max_model_len or math.inf)
        return fits and num_draft_tokens < (method.max_num_draft_tokens or math.inf) and not method.hidden_layers

    def ask_ahead(self, assumed: tuple[int, ...], base_len: int, num_draft_tokens: int) -> None:
        """Ask for what follows `assumed`, the tokens from output index base_len on, before they are committed."""
        step = dataclasses.replace(
            self._step(base_len, num_draft_tokens + 1), base_len=base_len, committed_token_ids=assumed
        )
        self._ahead = Question.ask(self.lease.drafter, step, assumed)

    async def late_answer(self) -> LateAnswer | None:
        """What the late answer would have been worth, once it has come; None: it has not, or nobody can tell."""
        late = self._late
        if late is None:
            return None
        if not late.asking.done():
            self._watch(late)
            return None
        self._late = None
        return _held_against(self._committed, late, await self._reply_to(late), is_catch_up=self.is_catch_up)

    async def close(self) -> None:
        """Gives the place back first: whatever is cancelled in here, it is given back."""
        pending = [question for question in (self._late, self._ahead) if question is not None]
        self._late = self._ahead = None
        self.lease.release()
        for question in pending:
            question.asking.cancel()
        await asyncio.shield(_end(self.lease.drafter, pending))

    def _step(self, committed_len: int, num_draft_tokens: int) -> DraftStep:
        """Reports what has been committed, and the hidden states that have come, since the last step."""
        return DraftStep(
            epoch=self._spec.epoch,
            base_len=self._told_len,
            committed_token_ids=tuple(self._committed[self._told_len : committed_len]),
            num_draft_tokens=num_draft_tokens,
            hidden_states=self.hidden.hand_over(),
            max_tree_nodes=num_draft_tokens if self._options.token_tree else 0,
        )

    def _watch(self, late: Question) -> None:
        """Counts, once, an answer that takes longer than any may."""
        if late.is_overdue or late.took_s < self._options.timeout_s:
            return
        late.is_overdue = True
        self.num_timeouts += 1
        self._options.metrics.draft_timeouts.inc()
        if self._options.trace is not None:
            self._options.trace.add_event("draft_timeout")

    async def _reply_to(self, question: Question) -> ProposalReply:
        reply = await question.asking
        self.hidden.rewind(reply.missing_hidden_from)
        return reply


def guess_after(proposal: Proposal, num_draft_tokens: int) -> tuple[Proposal, tuple[int, ...]]:
    """The proposal cut to so many tokens, and, of a chain that had more, those tokens and the guess of the next one."""
    if proposal.parents or len(proposal.token_ids) <= num_draft_tokens:
        return proposal, ()
    cut = dataclasses.replace(
        proposal,
        token_ids=proposal.token_ids[:num_draft_tokens],
        laws=proposal.laws[:num_draft_tokens],
        confidence=proposal.confidence[:num_draft_tokens],
    )
    return cut, proposal.token_ids[: num_draft_tokens + 1]


def _held_against(
    committed: Sequence[int], late: Question, reply: ProposalReply, *, is_catch_up: bool
) -> LateAnswer | None:
    """How good the draft would have been; None where that is not known: a tree, or too little has been committed."""
    proposal, timings = reply.proposal, reply.timings
    known = tuple(committed[proposal.base_len : proposal.base_len + len(proposal.token_ids)])
    num_accepted = next((place for place, token in enumerate(known) if token != proposal.token_ids[place]), len(known))
    if proposal.parents or num_accepted == len(known) < len(proposal.token_ids):
        return None
    return LateAnswer(
        method=proposal.method,
        num_asked=late.step.num_draft_tokens,
        num_draft_tokens=len(proposal.token_ids),
        num_accepted=num_accepted,
        draft_s=timings.forward_us * 1e-6,
        overhead_s=max(0.0, late.took_s - timings.total_us * 1e-6),
        is_catch_up=is_catch_up,
    )


async def _end(drafter: Drafter, pending: Sequence[Question]) -> None:
    await asyncio.gather(*(question.asking for question in pending), return_exceptions=True)
    await drafter.close()
