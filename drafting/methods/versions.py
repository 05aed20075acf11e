"""Versions of one draft method: new weights take over between two rounds, and an open session keeps those it has.

What a session has in a draft's cache was computed with one version's weights, so no draft mixes two of them: a
proposal's tokens and laws are of one version, as rejection mode needs, and nothing is computed again. A version is
freed with its last session.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo, Proposal


class VersionedMethod:
    """Implements drafting.methods.interface.DraftMethod. `swap` is called from the same thread as the other calls."""

    def __init__(self, method: DraftMethod) -> None:
        self._newest = method
        self._of: dict[int, DraftMethod] = {}
        self.info: DraftMethodInfo = dataclasses.replace(method.info, version=1)

    @property
    def grammars(self) -> GrammarCompiler | None:
        return self._newest.grammars

    @property
    def num_kept(self) -> int:
        """The number of versions in memory: the newest, and those that sessions still have."""
        return len({id(self._newest), *map(id, self._of.values())})

    def swap(self, method: DraftMethod) -> DraftMethod:
        """Makes it the method of sessions opened from now on. Returns the one that it was until now."""
        replaced, self._newest = self._newest, method
        self.info = dataclasses.replace(method.info, version=self.info.version + 1)
        return replaced

    def open(self, session: DraftSession) -> None:
        self._of[id(session)] = self._newest
        self._newest.open(session)

    def advance(self, session: DraftSession) -> bool:
        return self._of[id(session)].advance(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        members: dict[int, list[DraftSession]] = {}
        for session in sessions:
            members.setdefault(id(self._of[id(session)]), []).append(session)
        proposals: dict[int, Proposal] = {}
        for group in members.values():
            drafted = self._of[id(group[0])].propose(group)
            proposals.update(zip(map(id, group), drafted, strict=True))
        return [proposals[id(session)] for session in sessions]

    def close(self, session: DraftSession) -> None:
        method = self._of.pop(id(session), None)
        if method is not None:
            method.close(session)
