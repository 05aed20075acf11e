"""Replies that wait until the next forward has begun.

The event loop's thread holds the interpreter for about 0.5 ms per reply, and the engine's thread needs the interpreter
between two forwards but not during one. So a reply that the next round does not wait for is sent once the next forward
has begun, any other reply at once (2a9685d).
"""

from __future__ import annotations

from outrider.shared.messages import Commit
from outrider.verifier_service.session import OnReply, VerifierSession


class ReplyQueue:
    """A first-in, first-out queue of replies. Belongs to the engine's thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[OnReply, Commit]] = []

    def put(self, session: VerifierSession, commit: Commit) -> None:
        self._waiting.append((session.on_reply, commit))

    def send(self) -> None:
        """Sends all replies in the queue."""
        waiting, self._waiting = self._waiting, []
        for on_reply, commit in waiting:
            on_reply(commit)

    def fail(self, session: VerifierSession, error: Exception) -> None:
        """Sends the queue, then the error as the session's last reply."""
        self.send()
        session.on_reply(error)
