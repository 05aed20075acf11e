"""The contract of token-by-token drafting: logits at the positions of a growing proposal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.drafting.growth.draft import Draft
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.laws import Row


class DraftNet(Protocol):
    """Predicts next tokens, as a network or a few heads. All calls come from one thread.

    Contract: logits at a position depend only on the committed tokens (and the target's hidden states) and on the draft
    path to it.
    """

    def open(self, session: DraftSession) -> None:
        """Creates per-session state. The session may already have committed tokens."""
        ...

    def advance(self, session: DraftSession) -> bool:
        """Catches up with committed tokens by one bounded piece; True while more than a step's worth is left."""
        ...

    def logits(self, drafts: Sequence[Draft]) -> list[Sequence[Row]]:
        """Returns, for each draft, float32 [V] for every position of its frontier.

        V: the target's vocabulary (-inf: never). In the first call for a proposal every frontier is [ROOT]. A draft
        that cannot be served is stopped, and gets an empty list.
        """
        ...

    def close(self, session: DraftSession) -> None:
        """Frees all that belongs to the session."""
        ...
