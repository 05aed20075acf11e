"""Which of the target's weights serve, and which sessions may open on them.

A session is of one kind (engine/numerics.py, and the digest of the weights where they can be replaced), and no answer
is made by two. Before other weights take over there is a drain: sessions of the weights that serve go on and may still
open, as they come from other verifiers, and those for the coming ones wait.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from dataclasses import dataclass, field

from outrider.shared.errors import OutriderError, TargetReplaced, Unavailable
from outrider.shared.messages import of_other_weights, weights_of


@dataclass(frozen=True)
class TargetState:
    """numerics: kind of the weights that serve. next_numerics: of those that take over soon, or empty.

    version: of the weights, 1 for the first. over: done when the drain is; only in a state with next_numerics.
    """

    numerics: str
    version: int = 1
    next_numerics: str = ""
    over: Future[None] = field(default_factory=Future, compare=False)


class ServedTarget:
    """The state as of now. `state` is replaced as a whole, on any thread."""

    def __init__(self, numerics: str) -> None:
        self.state = TargetState(numerics)

    def drain_for(self, next_numerics: str) -> None:
        now = self.state
        self.state = TargetState(now.numerics, now.version, next_numerics)

    def settle(self, numerics: str, version: int) -> None:
        """Ends the drain, with the weights that serve from now on."""
        drained, self.state = self.state, TargetState(numerics, version)
        drained.over.set_result(None)

    async def admit(self, numerics: str | None, *, continues: bool = False) -> int:
        """Returns the version of the weights that a session of this kind (None: any) opens on, once they serve.

        continues: it has tokens already. Raises TargetReplaced for other weights, and for tokens of which a gateway of
        an earlier version does not say whose they are; Unavailable for another kind.
        """
        while True:
            state = self.state
            if continues and numerics is None and weights_of(state.numerics):
                raise TargetReplaced("the session does not say with which weights it was begun")
            if state.next_numerics and numerics in (None, state.next_numerics):
                await asyncio.shield(asyncio.wrap_future(state.over))
            elif numerics in (None, state.numerics):
                return state.version
            else:
                raise _refusal(numerics, state.numerics)


def _refusal(numerics: str | None, own: str) -> OutriderError:
    if numerics and of_other_weights(numerics, own):
        return TargetReplaced(f"the session needs weights that are served here no more ({numerics}; here {own})")
    return Unavailable(f"the session needs numerics {numerics or 'unreported'}, this verifier has {own}")
