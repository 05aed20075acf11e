"""What a draft method must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from drafter_service.session import DraftSession
from shared.messages import DraftMethodInfo, Proposal


class DraftMethod(Protocol):
    """One way to guess tokens, for many sessions at once. All calls come from one thread.

    Contract: a method may be wrong but never unfair. In rejection mode every token it proposes was drawn from exactly
    the law it sends with it; without laws it proposes deterministically from the prefix alone. In exact mode it uses
    the shared noise of the session's stream key where it has a law to sample from.
    """

    info: DraftMethodInfo

    def open(self, session: DraftSession) -> None:
        """Makes room for per-session state. The session may already have committed tokens."""
        ...

    def advance(self, session: DraftSession) -> bool:
        """One bounded piece of catching up with the committed tokens; True while more than a step's worth is left."""
        ...

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        """One proposal per session (each has a `step`) on its committed tokens; fewer tokens than asked is fine."""
        ...

    def close(self, session: DraftSession) -> None:
        """Frees everything held for the session."""
        ...
