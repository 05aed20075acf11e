"""One question to a drafter: what it stands on, and when its answer came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gateway.interfaces import Drafter
from shared.messages import DraftStep, ProposalReply


@dataclass
class Question:
    """`assumed`: the last tokens that the answer stands on, which had not been committed when it was asked."""

    asking: asyncio.Task[ProposalReply]
    step: DraftStep
    asked_at: float
    assumed: tuple[int, ...] = ()
    answered_at: float | None = None
    is_overdue: bool = False  # it has taken longer than any answer may

    @classmethod
    def ask(cls, drafter: Drafter, step: DraftStep, assumed: tuple[int, ...] = ()) -> Question:
        question = cls(asyncio.create_task(drafter.propose(step)), step, time.perf_counter(), assumed)
        question.asking.add_done_callback(question._answered)
        return question

    @property
    def base_len(self) -> int:
        """Output index that the answer's first token would have."""
        return self.step.committed_len

    @property
    def took_s(self) -> float:
        """Seconds until the answer came; until now while it has not."""
        return (self.answered_at or time.perf_counter()) - self.asked_at

    def holds(self, committed: Sequence[int]) -> bool:
        """Whether the answer stands on exactly what has been committed."""
        assumed_from = self.base_len - len(self.assumed)
        return len(committed) == self.base_len and tuple(committed[assumed_from:]) == self.assumed

    async def answer_within(self, seconds: float) -> bool:
        """Whether the answer is there, after waiting so long at most. Cancelled while it waits, it gives up the
        question."""
        try:
            await asyncio.wait({self.asking}, timeout=seconds)
        except asyncio.CancelledError:
            self.asking.cancel()
            raise
        return self.asking.done()

    async def give_up(self) -> None:
        """Nobody waits for the answer any more."""
        self.asking.cancel()
        await asyncio.gather(self.asking, return_exceptions=True)

    def _answered(self, _asking: asyncio.Task[ProposalReply]) -> None:
        self.answered_at = time.perf_counter()
