"""One session at the drafter: the committed tokens as far as they were reported, and the step it is asked for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from drafter_service.hidden_rows import HiddenRows
from shared.errors import CommitRefused, InvalidRequest
from shared.messages import DraftStep, ProposalReply, SessionSpec

if TYPE_CHECKING:
    from engine.grammar import GrammarState

# Called on the engine's thread with each proposal, or with the error that ends the session.
OnReply = Callable[[ProposalReply | Exception], None]


@dataclass
class DraftSession:
    """`token_ids` are prompt and committed output; draft tokens are never among them."""

    spec: SessionSpec
    token_ids: list[int]
    on_reply: OnReply
    step: DraftStep | None = None
    step_arrived_at: float = 0.0
    hidden: HiddenRows = field(default_factory=HiddenRows)
    # The request's grammar where it has been compiled already; None: the method compiles it.
    grammar: GrammarState | None = None
    # Output index from which on the method lacks hidden states that it should have; told with the next reply.
    missing_hidden_from: int | None = None
    _unchanged_len: int = 0

    @property
    def prompt_len(self) -> int:
        return len(self.spec.prompt_token_ids)

    @property
    def committed_len(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def output_token_ids(self) -> list[int]:
        return self.token_ids[self.prompt_len :]

    def take_unchanged_len(self) -> int:
        """How many tokens at the front are what they were at the last call; the rest is new or has been replaced."""
        unchanged_len, self._unchanged_len = self._unchanged_len, len(self.token_ids)
        return unchanged_len

    def report(self, step: DraftStep) -> None:
        """Takes up the step's committed tokens by absolute index: what is known already is overwritten, not appended.

        Raises CommitRefused on another epoch, InvalidRequest when tokens before the step are missing.
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
            self._unchanged_len = min(self._unchanged_len, agreed)
            self.hidden.cut_back(agreed)
        for piece in step.hidden_states:
            self.hidden.add(piece, self.prompt_len)
        self.step = step if step.num_draft_tokens > 0 else None
        self.step_arrived_at = time.perf_counter()


def common_prefix_len(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens at the front are the same."""
    limit = min(len(left), len(right))
    return next((place for place in range(limit) if left[place] != right[place]), limit)
