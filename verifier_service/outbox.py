"""Replies on their way out, which may wait until the next forward has begun.

Whoever takes a reply (the event loop's thread) needs the interpreter for about half a millisecond, and so does what
stands between two forwards on the engine's thread. A forward does not. So replies that nobody has to answer go out when
the forward after them begins, and those that the next round waits for at once.
"""

from __future__ import annotations

from shared.messages import Commit
from verifier_service.session import OnReply, VerifierSession


class Outbox:
    """Belongs to the engine's thread. Replies leave it in the order in which they were put there."""

    def __init__(self) -> None:
        self._waiting: list[tuple[OnReply, Commit]] = []

    def put(self, session: VerifierSession, commit: Commit) -> None:
        self._waiting.append((session.on_reply, commit))

    def send(self) -> None:
        """Everything that is here."""
        waiting, self._waiting = self._waiting, []
        for on_reply, commit in waiting:
            on_reply(commit)

    def fail(self, session: VerifierSession, error: Exception) -> None:
        """The session's last reply, after those that were put here before it."""
        self.send()
        session.on_reply(error)
