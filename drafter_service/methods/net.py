"""What drafts token by token must do: say what may follow at the places of a growing proposal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from drafter_service.growth.draft import Draft
from drafter_service.session import DraftSession
from engine.sampling import Row


class DraftNet(Protocol):
    """A network, or a few heads, that guesses what follows. All calls come from one thread.

    Contract: the guess at a place depends on the committed tokens (and the target's hidden states) and on the draft
    path to that place, on nothing else.
    """

    def open(self, session: DraftSession) -> None:
        """Makes room for per-session state. The session may already have committed tokens."""
        ...

    def advance(self, session: DraftSession) -> bool:
        """One bounded piece of catching up with the committed tokens; True while more than a step's worth is left."""
        ...

    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        """For each draft, float32 [V] for every place of its frontier, V the target's vocabulary (-inf: never).

        In the first call for a proposal every frontier is [ROOT]. A draft that cannot be served is stopped, and gets
        an empty list.
        """
        ...

    def close(self, session: DraftSession) -> None:
        """Frees everything held for the session."""
        ...
