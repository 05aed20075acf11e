"""The two values that a round of drafting consists of, and the contract of a draft source."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Protocol

from outrider.gateway.metrics import DraftCame
from outrider.shared.messages import Commit, LocalDrafts, Proposal, Timings


@dataclass(frozen=True)
class Ask:
    """What a session wants for its next round. method: METHOD_AUTO: any. num_draft_tokens: 0: none, for `free_run`
    tokens. patience_s: seconds; how long a draft is worth waiting for.
    """

    committed_len: int
    method: str = ""
    num_draft_tokens: int = 0
    free_run: int = 0
    patience_s: float = math.inf


@dataclass(frozen=True)
class Answer:
    """What came of an Ask, and how long it took."""

    ask: Ask
    came: DraftCame = DraftCame.NOT_WANTED
    # At most one of the two: a draft to verify, or the local drafts that the verifier is to make.
    proposal: Proposal | None = None
    local_drafts: LocalDrafts | None = None
    # Who was asked; "" where nobody was, and offline, where drafters have no address.
    method: str = ""
    drafter: str = ""
    # Seconds that the round waited for the draft.
    wait_s: float = 0.0
    # The drafter's own.
    timings: Timings = field(default_factory=Timings)
    # Whether the drafter had to read the prompt, or much of the output, before it could draft.
    is_catch_up: bool = False
    # Whether this draft may have been requested before its round began, and whether the next one may be.
    may_be_ahead: bool = False
    looks_ahead: bool = False
    # Tokens that the verifier may commit before the session asks again; 0: only what it makes of the proposal.
    max_new_tokens: int = 0

    def for_commit(self, commit: Commit) -> Answer:
        """This answer as it concerns the round of one commit: only the first round of a run waited for it."""
        if commit.base_len == self.ask.committed_len:
            return self
        return dataclasses.replace(self, proposal=None, method="", drafter="", wait_s=0.0, timings=Timings())


class DraftSource(Protocol):
    """Where a session's drafts come from: a drafter service, or its verifier.

    Contract: `answer` waits no longer than ask.patience_s and raises for no fault of a drafter. None: this source does
    not serve the method, so the next one is asked. `drafted` is called once for each commit, in order, and returns what
    the draft of that round was and took. After `close` nothing else is called; `close` itself may be called again.
    """

    async def answer(self, ask: Ask) -> Answer | None: ...

    def drafted(self, answer: Answer, commit: Commit) -> Answer: ...

    async def close(self) -> None: ...
