"""Reports of a round, by a verifier in simulated time, to the gateway and to the draft-length policy."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.verifier_service.timing.gathering import LastRound


@dataclass(slots=True)
class RoundTimes:
    """Times of a round: what messages.Timings says to all of its sessions, in seconds.

    draft_s: what the verifier's own drafting took for all its sessions together; 0: it did not draft.
    """

    batch_sessions: int
    open_sessions: int
    draft_s: float = 0.0
    # Of the forward: seconds, and rows of all sessions.
    forward_s: float = 0.0
    num_rows: int = 0


class Drafted(Protocol):
    """A session of a verifier that drafts locally."""

    @property
    def max_tokens(self) -> int: ...

    # The method of its next rounds, and the draft tokens that they are to have; 0: none.
    method: str
    num_wanted: int
    # Rows that the verifier still has to compute.
    num_pending: int

    def num_unread(self, method: str) -> int: ...


@dataclass(slots=True)
class SessionRound:
    """One session's part in a round.

    base_len: output before it. num_asked: draft tokens that it asked for, cut at the end of its output; num_proposed:
    those that came. more: its run continues. method: that drafted, if one did.
    """

    session: Drafted
    times: RoundTimes
    base_len: int
    num_asked: int
    num_proposed: int
    num_committed: int
    more: bool
    method: str = ""


class DraftLengths(Protocol):
    """Contract: decides how many tokens the sessions of one verifier draft.

    `opened`: a request's session, before its prefill. `decide` comes before each round's drafts, with the sessions that
    are about to be in it, and sets `method` and `num_wanted` where they shall be others. `observe` comes after each
    round: last_round is its tokens and seconds, num_open the sessions of the verifier.
    """

    def opened(self, session: Drafted) -> None: ...

    def decide(self, sessions: Iterable[Drafted]) -> None: ...

    def observe(self, members: Sequence[SessionRound], last_round: LastRound, num_open: int) -> None: ...


class FixedLengths:
    """Always the same; 0: no drafts."""

    def __init__(self, method: str, num_draft_tokens: int) -> None:
        self._method = method
        self._num_draft_tokens = num_draft_tokens

    def opened(self, session: Drafted) -> None:
        session.method = self._method
        session.num_wanted = self._num_draft_tokens

    def decide(self, sessions: Iterable[Drafted]) -> None:
        """Nothing changes."""

    def observe(self, members: Sequence[SessionRound], last_round: LastRound, num_open: int) -> None:
        """Nothing is learned."""
