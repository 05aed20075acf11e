"""The drafts of an engine that says which request a text is of: by its name, a session is found without a search."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from outrider.plugins.fleet import Ask, Fleet
from outrider.plugins.options import Options
from outrider.plugins.rows import Session, Tokens
from outrider.plugins.usable import Draft, usable

# seconds; a request that is not seen for so long has ended, and the time between two looks for such
_UNSEEN_S, _SWEEP_S = 10.0, 1.0


@dataclass(frozen=True)
class Text:
    """A request's tokens so far, and how many draft tokens its engine has room for."""

    name: Hashable
    token_ids: Tokens
    room: int


class NamedRequests:
    """Used by the engine's thread. A thread of its own closes the sessions of ended requests, of an idle engine too."""

    def __init__(self, options: Options, vocab_size: int, log: logging.Logger, max_branches: int = 1) -> None:
        self.fleet = Fleet(options)
        self._options, self._vocab_size, self._max_branches, self._log = options, vocab_size, max_branches, log
        self._numbers = itertools.count(1)
        self._sessions: dict[Hashable, Session] = {}
        self._lock = threading.Lock()  # of the sessions
        self._closed = threading.Event()
        threading.Thread(target=self._sweep, name="outrider-sweep", daemon=True).start()

    def drafts(self, texts: Iterable[Text]) -> list[Draft]:
        """The draft of each text, of at most its room, with parents; none at all on an error. Never raises."""
        try:
            asks = [self._ask(text) for text in texts]
            found = self.fleet.ask(asks)
            return [self._usable(ask, found.get(ask.session.number, Draft())) for ask in asks]
        except Exception:
            self._log.exception("Outrider has no drafts for this step")
            return []

    def forget(self, names: Iterable[Hashable]) -> None:
        """Closes the sessions of requests that have ended. Never raises."""
        try:
            with self._lock:
                ended = [self._sessions.pop(name) for name in names if name in self._sessions]
            self.fleet.forget(ended)
        except Exception:
            self._log.exception("Outrider cannot close sessions")

    def close(self) -> None:
        self._closed.set()
        self.fleet.close()

    def _ask(self, text: Text) -> Ask:
        length = len(text.token_ids)
        with self._lock:
            session = self._sessions.get(text.name)
            if session is None or session.length > length:  # a name may be given again
                session = self._sessions[text.name] = Session(next(self._numbers))
            session.length, session.seen_at = length, time.monotonic()
        return Ask(session, text.token_ids, max(0, text.room), self._max_branches)

    def _usable(self, ask: Ask, draft: Draft) -> Draft:
        return usable(
            draft,
            num_tokens=ask.num_draft_tokens,
            vocab_size=self._vocab_size,
            min_confidence=self._options.min_confidence,
            max_branches=ask.max_branches,
        )

    def _sweep(self) -> None:
        while not self._closed.wait(_SWEEP_S):
            limit = time.monotonic() - _UNSEEN_S
            with self._lock:
                unseen = [name for name, session in self._sessions.items() if session.seen_at < limit]
            self.forget(unseen)
