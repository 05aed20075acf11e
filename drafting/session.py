"""One session at the drafter: the committed tokens reported so far, and the current step."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from outrider.drafting.hidden_rows import HiddenRows
from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.errors import CommitRefused, InvalidRequest
from outrider.shared.messages import DraftStep, ProposalReply, SessionSpec

if TYPE_CHECKING:
    from outrider.engine.sampling.grammar import GrammarState

# tokens; longest report that a proposal catches up with; longer ones (after a free run) are processed separately
LONG_REPORT = 32
# Called on the engine's thread with each proposal, or with the error that ends the session.
OnReply = Callable[[ProposalReply | Exception], None]


def no_flush() -> None:
    """The flush of a session whose replies are sent one by one."""


@dataclass
class DraftSession:
    """One session's state. token_ids: prompt and committed output, never draft tokens."""

    spec: SessionSpec
    token_ids: list[int]
    on_reply: OnReply
    step: DraftStep | None = None
    step_arrived_at: float = 0.0
    hidden: HiddenRows = field(default_factory=HiddenRows)
    # Called on the engine's thread after all replies of a batch; equal for sessions whose replies are sent together.
    flush: Callable[[], None] = no_flush
    # The request's compiled grammar; None: the method compiles it.
    grammar: GrammarState | None = None
    # Output index from which the method lacks hidden states; reported with the next reply.
    missing_hidden_from: int | None = None
    # By reader.
    _unchanged_len: dict[str, int] = field(default_factory=dict)

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def committed_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    def take_unchanged_len(self, reader: str = "") -> int:
        """Returns the number of leading tokens unchanged since the reader's last call; the rest is new or replaced."""
        unchanged_len = self._unchanged_len.get(reader, 0)
        self._unchanged_len[reader] = len(self.token_ids)
        return unchanged_len

    def report(self, step: DraftStep) -> None:
        """Stores the step's committed tokens by absolute index, overwriting known ones.

        Raises CommitRefused for another epoch, InvalidRequest when tokens before the step are missing.
        """
        if step.epoch != self.spec.epoch:
            raise CommitRefused(f"step of epoch {step.epoch} at a session of epoch {self.spec.epoch}", param="epoch")
        if step.base_len > self.committed_len:
            raise InvalidRequest(
                f"step at {step.base_len}, but only {self.committed_len} tokens were reported", param="base_len"
            )
        start = self.prompt_len + step.base_len
        replaced = self.token_ids[start:]
        del self.token_ids[start:]
        self.token_ids.extend(step.committed_token_ids)
        if replaced:
            agreed = start + common_prefix_len(replaced, step.committed_token_ids)
            for reader, unchanged_len in self._unchanged_len.items():
                self._unchanged_len[reader] = min(unchanged_len, agreed)
            self.hidden.cut_back(agreed)
        for piece in step.hidden_states:
            self.hidden.add(piece, self.prompt_len)
        self.step = step if step.num_draft_tokens > 0 else None
        self.step_arrived_at = time.perf_counter()
