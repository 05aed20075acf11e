"""Bounds the time that grammars' masks add to a round: sessions beyond it sit out, and take turns.

Masks are computed one by one after the forward, and every session of the round waits for them: 32 outputs under an
ambiguous grammar, at 5 ms each, made a round of 8 ms last 170. So all masks together may take as long as forwards do,
which makes the others' rounds at most twice as long. A mask that takes longer is paid off by rounds without masks.
Sessions without a grammar never sit out, and where all have one, none does: it would only cost them forwards.

When a session runs has no effect on its tokens.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from outrider.verifier_service.scheduler import Work
from outrider.verifier_service.session import VerifierSession


class MaskTurns:
    """Belongs to the engine's thread."""

    def __init__(self) -> None:
        # seconds; of masks that may be computed before the next forward
        self._left_s = 0.0
        # Sessions' mask time before their round.
        self._before_s: dict[int, float] = {}

    def choose(self, sessions: Collection[VerifierSession]) -> None:
        """Sets which sessions sit out the next round. Those that have waited for longest go first."""
        waiting = [session for session in sessions if session.step is not None]
        masked = [session for session in waiting if session.processor.grammar is not None]
        has_others = any(session.processor.grammar is None and not session.finished for session in sessions)
        is_needed = len(masked) == len(waiting)
        if not has_others:
            self._left_s = math.inf  # nobody is owed what is spent now
        left_s, is_first = self._left_s, True
        for session in sorted(masked, key=lambda session: session.step_arrived_at):
            fits = left_s >= session.mask_s or (is_first and (left_s > 0.0 or is_needed))
            session.sits_out = session.mask_s > 0.0 and not fits
            if session.mask_s > 0.0 and not session.sits_out:
                left_s, is_first = left_s - session.mask_s, False
        self._before_s = {id(session): session.masks_s for session in masked if not session.sits_out}

    def observe(self, plan: Sequence[Work], forward_s: float) -> None:
        """Accounts for a round, after its masks. forward_s: of its forward; infinite: nothing fitted, so that no
        session sits out the next one, which may hold the blocks that the others need.
        """
        took_s = 0.0
        for work in plan if self._before_s else ():
            session = work.session
            session.mask_s = session.masks_s - self._before_s.get(id(session), session.masks_s)
            took_s += session.mask_s
        self._left_s = min(self._left_s - took_s, 0.0) + forward_s
