"""One request for a proposal: its step, and when the answer came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.gateway.request.interfaces import Drafter
from outrider.shared.messages import DraftStep, ProposalReply


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
