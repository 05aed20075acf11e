"""The contract of a draft method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo, Proposal


class DraftMethod(Protocol):
    """Proposes tokens for many sessions at once. All calls come from one thread.

    Contract: proposals may be wrong but never biased. In rejection mode every token is sampled from exactly the
    distribution sent with it; without distributions, proposals depend deterministically on the prefix alone. In exact
    mode, a method that has a distribution uses the shared noise of the session's stream key.
    `grammars`: the compiler of requests' grammars; None for a method that compiles none, which may still use the
    session's. A service that must not block compiles on another thread and gives the session its grammar.
    """

    @property
    def info(self) -> DraftMethodInfo: ...

    @property
    def grammars(self) -> GrammarCompiler | None: ...

    def open(self, session: DraftSession) -> None:
        """Creates per-session state. The session may already have committed tokens."""
        ...

    def advance(self, session: DraftSession) -> bool:
        """Catches up with committed tokens by one bounded piece; True while more than a step's worth is left."""
        ...

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        """Returns one proposal per session (each has a `step`) on its committed tokens, no longer than requested."""
        ...

    def close(self, session: DraftSession) -> None:
        """Frees all that belongs to the session."""
        ...
