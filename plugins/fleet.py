"""The drafters of one engine: which of them has a session, and one round of questions with a deadline.

A session is opened at another drafter by one message with its whole text, so a drafter may be lost at any time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.plugins import wire
from outrider.plugins.link import Link
from outrider.plugins.options import Options
from outrider.plugins.rows import Session, Tokens
from outrider.plugins.usable import Draft

# tokens; opened in one step: after the loss of a drafter the texts of a large batch go out over several steps
_MAX_OPENED = 32_768
# seconds; after which a drafter that answers nothing is given up, and the longest pause after an answer that came late:
# as long as it was late, doubled while that repeats
_LOST_S, _LONGEST_PAUSE_S = 1.0, 5.0
# seconds; in which a drafter that has refused a session, as one that is full does, gets no other
_FULL_S = 1.0
# tokens of a draft that are looked at; engines ask for a few
_MAX_TAKEN = 64
# The drafter's argmax chain: no noise, and no end.
_PARAMS = wire.SamplingParams(temperature=0.0, top_p=1.0, repetition_penalty=1.0, max_tokens=2**30, ignore_eos=True)
_EPOCH = 1


@dataclass(frozen=True)
class Ask:
    """A session, its row of tokens, and how many draft tokens are wanted; 0: it is only opened.

    max_branches: of a node of the draft; 1: a chain.
    """

    session: Session
    row: Tokens
    num_draft_tokens: int
    max_branches: int = 1


@dataclass
class _State:
    """late_since: when the round began that the drafter has not answered; None: it has. asks_at: not asked before."""

    late_since: float | None = None
    num_late: int = 0
    asks_at: float = 0.0
    opens_at: float = 0.0


@dataclass
class _Round:
    """Session number -> what is waited for, and what has come."""

    wanted: dict[int, Session] = field(default_factory=dict)
    answers: dict[int, Draft] = field(default_factory=dict)


class Fleet:
    """Used by the engine's thread; the links' threads bring answers."""

    def __init__(self, options: Options) -> None:
        self.links: list[Link] = []
        self._options = options
        self._answered = threading.Condition()  # guards all below, and the sessions' fields
        self._states: dict[Link, _State] = defaultdict(_State)
        self._sessions: dict[int, Session] = {}
        self._round = _Round()
        # of the round that is being made: sessions of each link, and tokens of the texts opened
        self._num_held: Counter[Link] = Counter()
        self._num_opened = 0

    def connect(self, model: str, tokenizer_digest: str, vocab_size: int, log: logging.Logger) -> None:
        """Connects to the drafters of the options, and goes on to where they are not there."""
        method = self._options.method
        engine = wire.DraftEngine(model=model, tokenizer_digest=tokenizer_digest, vocab_size=vocab_size, method=method)
        for address in self._options.drafters:
            self.links.append(Link(address, self._options, engine, self.take, log))

    def ask(self, asks: Sequence[Ask]) -> dict[int, Draft]:
        """Returns the drafts that come before the deadline, by the session's number; `Ask`s that have none lack."""
        started = time.monotonic()
        deadline_s = self._options.deadline_ms / 1e3
        messages: dict[Link, list[dict[str, Any]]] = defaultdict(list)
        with self._answered:
            current = self._round = _Round()
            self._give_up_lost(started)
            self._num_held = Counter(session.link for session in self._sessions.values() if session.link is not None)
            self._num_opened = 0
            for ask in asks:
                self._add(ask, messages, started)
        for link, items in messages.items():
            link.send(items)
        with self._answered:
            self._answered.wait_for(
                lambda: len(current.answers) >= len(current.wanted), deadline_s - (time.monotonic() - started)
            )
            self._note_late(current, started)
            return dict(current.answers)

    def take(self, link: Link, answers: Any) -> None:
        """A link's answers; those of sessions that it no longer has are dropped."""
        with self._answered:
            state, now = self._states[link], time.monotonic()
            if state.late_since is not None:  # it is back, late
                late_s = now - state.late_since - self._options.deadline_ms / 1e3
                state.late_since = None
                state.asks_at = now + min(_LONGEST_PAUSE_S, late_s * 2 ** min(state.num_late - 1, 10))
            for answer in answers[: len(self._sessions)]:  # no honest drafter sends more in a message
                session = self._sessions.get(answer.session)
                if session is None or not _is_at(session, link):
                    continue
                session.owes = False
                if answer.WhichOneof("answer") != "proposal":
                    session.link, state.opens_at = None, now + _FULL_S
                    self._round.wanted.pop(session.number, None)
                    continue
                proposal = answer.proposal.proposal
                is_wanted = session.number in self._round.wanted  # else it is of an earlier round, late
                if is_wanted and proposal.base_len == session.sent_len - session.open_len:
                    found = proposal.token_ids, proposal.confidence, proposal.parents
                    self._round.answers[session.number] = Draft(*(part[:_MAX_TAKEN] for part in found))
            if len(self._round.answers) >= len(self._round.wanted):
                self._answered.notify()

    def forget(self, sessions: Sequence[Session]) -> None:
        """Closes sessions at their drafters."""
        closing: dict[Link, list[dict[str, Any]]] = defaultdict(list)
        with self._answered:
            for session in sessions:
                self._sessions.pop(session.number, None)
                if session.link is not None and _is_at(session, session.link):
                    closing[session.link].append({"session": session.number, "close": {}})
                session.link = None
        for link, items in closing.items():
            link.send(items)

    def close(self) -> None:
        for link in self.links:
            link.close()

    # ---- with the lock ----

    def _add(self, ask: Ask, messages: dict[Link, list[dict[str, Any]]], now: float) -> None:
        session, link = ask.session, ask.session.link
        if link is None or not _is_at(session, link):
            link = self._choose(now)
            if link is None or (self._num_opened and self._num_opened + session.length > _MAX_OPENED):
                return
            self._num_opened += session.length
            self._num_held[link] += 1
            session.link, session.generation, session.owes = link, link.generation, False
            session.open_len = session.sent_len = session.length
            self._sessions[session.number] = session
            messages[link].append({"session": session.number, "open": self._opening(ask)})
        elif session.owes or not ask.num_draft_tokens or not self._may_ask(link, now):
            return
        if not ask.num_draft_tokens:
            return
        step = {
            "epoch": _EPOCH,
            "base_len": session.sent_len - session.open_len,
            "committed_token_ids": ask.row[session.sent_len : session.length].tolist(),
            "num_draft_tokens": ask.num_draft_tokens,
            "max_tree_nodes": ask.num_draft_tokens if ask.max_branches > 1 else 0,
            "max_branches": ask.max_branches if ask.max_branches > 1 else 0,
        }
        session.sent_len, session.owes = session.length, True
        messages[link].append({"session": session.number, "step": step})
        self._round.wanted[session.number] = session

    def _opening(self, ask: Ask) -> dict[str, Any]:
        return {
            "session_id": str(ask.session.number),
            "epoch": _EPOCH,
            "method": self._options.method,
            "prompt_token_ids": ask.row[: ask.session.length].tolist(),
            "sampling_params": _PARAMS,
            "mode": wire.EXACT,
        }

    def _choose(self, now: float) -> Link | None:
        """The drafter with the fewest sessions of those that may be asked."""
        usable = [link for link in self.links if self._may_ask(link, now) and self._states[link].opens_at <= now]
        return min(usable, key=lambda link: self._num_held[link], default=None)

    def _may_ask(self, link: Link, now: float) -> bool:
        state = self._states[link]
        return link.is_up and state.late_since is None and state.asks_at <= now

    def _note_late(self, current: _Round, started: float) -> None:
        """A drafter is late if none of its sessions has an answer; a single one may have a long prompt to read."""
        answered = {session.link for number, session in current.wanted.items() if number in current.answers}
        for link in {session.link for session in current.wanted.values()}:
            if link in answered and link is not None:
                self._states[link].num_late = 0
                link.answered_in_time()
            elif link is not None and link.is_up:
                state = self._states[link]
                state.late_since, state.num_late = started, state.num_late + 1

    def _give_up_lost(self, now: float) -> None:
        for link, state in self._states.items():
            if state.late_since is not None and now - state.late_since > _LOST_S:
                state.late_since = None
                link.lose("it does not answer")


def _is_at(session: Session, link: Link) -> bool:
    return session.link is link and link.is_up and session.generation == link.generation
