"""Versions of one draft method: new weights take over between two rounds, and an open session keeps those it has.

What a session has in a draft's cache was computed with one version's weights, so no draft mixes two of them: a
proposal's tokens and laws are of one version, as rejection mode needs, and nothing is computed again. A version is
freed with its last session.

A version may be on trial: one new session in four is drafted for by the version before it, and if that one's drafts are
accepted more, it is served again.

The sessions of one cache salt may have versions of their own, which draft for no other session.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo, Proposal

# sessions; the last of every four is drafted for by the version before the one on trial
_DEAL = 4
# sessions of each version; fewer have no standard error to rely on, as the rounds of one text are alike
_FEWEST_SESSIONS = 8
# sessions of the version on trial; it has stood the trial then, at the latest
_MOST_SESSIONS = 48
# standard errors; by so much its drafts must be accepted less to be taken back: looked at after each round, and of few
# sessions, two would be reached by chance
_ERRORS = 3.0
# rounds of the version on trial and of the one before it, and share of that one's acceptance: below it a version is
# broken, and no error need be known
_BROKEN_ROUNDS, _REFERENCE_ROUNDS, _BROKEN_SHARE = 100, 40, 0.1
# sessions of the version on trial, and rounds of each of them: one text that nothing drafts well, a table in a
# docstring, had a head taken back that drafted an eighth more than the one before
_BROKEN_SESSIONS, _BROKEN_SESSION_ROUNDS = 3, 20


class Rounds:
    """Rounds with drafts of one version, and the draft tokens accepted in them, by session."""

    def __init__(self) -> None:
        self.count = self.total = 0
        self._of: dict[int, tuple[int, int]] = {}

    def add(self, session: int, num_accepted: int) -> None:
        """session: a number that no two sessions share."""
        self.count += 1
        self.total += num_accepted
        count, total = self._of.get(session, (0, 0))
        self._of[session] = count + 1, total + num_accepted

    @property
    def num_sessions(self) -> int:
        return len(self._of)

    def num_sessions_of(self, num_rounds: int) -> int:
        """Returns how many sessions have had `num_rounds` rounds or more."""
        return sum(count >= num_rounds for count, _ in self._of.values())

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    @property
    def squared_error(self) -> float:
        """The square of the mean's standard error, with sessions drawn at random, not rounds (a ratio estimator)."""
        num_sessions, mean = self.num_sessions, self.mean
        if num_sessions < 2:
            return math.inf
        residues = sum((total - mean * count) ** 2 for count, total in self._of.values())
        return residues / self.count**2 * num_sessions / (num_sessions - 1)


@dataclass(frozen=True)
class TrialResult:
    """What became of a version: whether it stays, and its rounds beside those of the version before it."""

    is_kept: bool
    newest: Rounds
    previous: Rounds


@dataclass
class _Trial:
    previous: DraftMethod
    previous_info: DraftMethodInfo
    on_result: Callable[[TrialResult], None]
    num_dealt: int = 0
    of_newest: Rounds = field(default_factory=Rounds)
    of_previous: Rounds = field(default_factory=Rounds)

    def is_kept(self) -> bool | None:
        """None: it is not decided yet."""
        new, old = self.of_newest, self.of_previous
        if self._is_broken():
            return False
        if min(new.num_sessions, old.num_sessions) >= _FEWEST_SESSIONS:
            least_mean = old.mean - _ERRORS * math.sqrt(new.squared_error + old.squared_error)
            if new.mean < least_mean:
                return False
        return True if new.num_sessions >= _MOST_SESSIONS else None

    def _is_broken(self) -> bool:
        new, old = self.of_newest, self.of_previous
        if new.count < _BROKEN_ROUNDS or old.count < _REFERENCE_ROUNDS or new.mean >= _BROKEN_SHARE * old.mean:
            return False
        return new.num_sessions_of(_BROKEN_SESSION_ROUNDS) >= _BROKEN_SESSIONS


@dataclass
class _Line:
    """The versions that some sessions get, new ones the newest. info: of the newest."""

    newest: DraftMethod
    info: DraftMethodInfo
    trial: _Trial | None = None

    @property
    def served(self) -> tuple[DraftMethod, ...]:
        return (self.newest,) if self.trial is None else (self.newest, self.trial.previous)

    def end_trial(self, *, is_kept: bool) -> None:
        trial, self.trial = self.trial, None
        if trial is None:
            return
        if not is_kept:
            self.newest, self.info = trial.previous, trial.previous_info
        trial.on_result(TrialResult(is_kept, trial.of_newest, trial.of_previous))


class VersionedMethod:
    """Implements drafting.methods.interface.DraftMethod. All is called from one thread."""

    def __init__(self, method: DraftMethod) -> None:
        self._common = _Line(method, dataclasses.replace(method.info, version=1))
        # By cache salt; those that have none get the common versions.
        self._of_salt: dict[str, _Line] = {}
        self._of: dict[int, DraftMethod] = {}
        # By id, as sessions come and go: a number for each that is open.
        self._numbers: dict[int, int] = {}
        self._num_opened = 0
        # Of all lines: no two versions have the same number.
        self._last_version = 1

    @property
    def info(self) -> DraftMethodInfo:
        """Of the newest common version."""
        return self._common.info

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self._common.newest.grammars

    @property
    def num_older(self) -> int:
        """The number of versions in memory that no new session gets, as open sessions still have them."""
        served = [method for line in (self._common, *self._of_salt.values()) for method in line.served]
        return len(set(map(id, self._of.values())) - set(map(id, served)))

    def swap(self, method: DraftMethod) -> DraftMethod:
        """Makes it the method of sessions opened from now on. Returns the one that it was until now."""
        return self._swap(self._common, method)

    def try_out(self, method: DraftMethod, on_result: Callable[[TrialResult], None], salt: str = "") -> DraftMethodInfo:
        """As `swap`, on trial; `on_result` is called at its end. Another version that comes before it ends it too.

        salt: it is for the sessions with this cache salt alone; until `forget`, they get no common version but the one
        that they have now.
        """
        line = self._common
        if salt:
            line = self._of_salt.setdefault(salt, _Line(self._common.newest, self._common.info))
        line.end_trial(is_kept=False)
        previous_info = line.info
        line.trial = _Trial(self._swap(line, method), previous_info, on_result)
        return line.info

    def forget(self, salt: str) -> None:
        """Gives new sessions with this cache salt the common versions again; ends a trial."""
        line = self._of_salt.pop(salt, None)
        if line is not None:
            line.end_trial(is_kept=False)

    def observe(self, session: DraftSession, num_accepted: int) -> None:
        """Records a round of the session that had a draft of this method."""
        line, method = self._line(session), self._of.get(id(session))
        trial = line.trial
        if trial is None or method is None:
            return
        if method is line.newest:
            trial.of_newest.add(self._numbers[id(session)], num_accepted)
        elif method is trial.previous:
            trial.of_previous.add(self._numbers[id(session)], num_accepted)
        is_kept = trial.is_kept()
        if is_kept is not None:
            line.end_trial(is_kept=is_kept)

    def open(self, session: DraftSession) -> None:
        line = self._line(session)
        method, trial = line.newest, line.trial
        if trial is not None:
            trial.num_dealt += 1
            method = trial.previous if trial.num_dealt % _DEAL == 0 else method
        self._of[id(session)] = method
        self._num_opened += 1
        self._numbers[id(session)] = self._num_opened
        method.open(session)

    def advance(self, session: DraftSession) -> bool:
        return self._of[id(session)].advance(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        members: dict[int, list[DraftSession]] = {}
        for session in sessions:
            members.setdefault(id(self._of[id(session)]), []).append(session)
        proposals: dict[int, Proposal] = {}
        for group in members.values():
            method = self._of[id(group[0])]
            try:
                drafted = method.propose(group)
            except Exception:
                for line in (self._common, *self._of_salt.values()):
                    if method is line.newest:
                        line.end_trial(is_kept=False)
                raise
            proposals.update(zip(map(id, group), drafted, strict=True))
        return [proposals[id(session)] for session in sessions]

    def close(self, session: DraftSession) -> None:
        self._numbers.pop(id(session), None)
        method = self._of.pop(id(session), None)
        if method is not None:
            method.close(session)

    def _line(self, session: DraftSession) -> _Line:
        return self._of_salt.get(session.spec.cache_salt, self._common)

    def _swap(self, line: _Line, method: DraftMethod) -> DraftMethod:
        line.end_trial(is_kept=False)
        replaced, line.newest = line.newest, method
        self._last_version += 1
        line.info = dataclasses.replace(method.info, version=self._last_version)
        return replaced
