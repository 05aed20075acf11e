"""Draft methods that only tests have: nearly always wrong, always right, and any method's chain grown into a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo, Proposal

# Random tokens beside each token of the chain, and the chance that one more of them repeats it.
_MAX_SIBLINGS = 2
_REPEATED = 0.125
_NEPHEW = 0.5


class NoiseMethod:
    """Random tokens: right once in a vocabulary."""

    def __init__(self, vocab_size: int, seed: int) -> None:
        self.info = DraftMethodInfo(name="noise")
        self.grammars: GrammarCompiler | None = None
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def open(self, session: DraftSession) -> None:
        pass

    def advance(self, session: DraftSession) -> bool:
        return False

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        return [
            Proposal(
                base_len=session.committed_len,
                token_ids=tuple(self._rng.integers(self._vocab_size, size=_wanted(session)).tolist()),
                method=self.info.name,
            )
            for session in sessions
        ]

    def close(self, session: DraftSession) -> None:
        pass


class OracleMethod:
    """Replays the plain run; `answers` maps a session's id to its whole output."""

    def __init__(self, answers: Mapping[str, Sequence[int]]) -> None:
        self.info = DraftMethodInfo(name="oracle")
        self.grammars: GrammarCompiler | None = None
        self._answers = answers

    def open(self, session: DraftSession) -> None:
        pass

    def advance(self, session: DraftSession) -> bool:
        return False

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        proposals = []
        for session in sessions:
            start = session.committed_len
            answer = self._answers[session.spec.session_id][start : start + _wanted(session)]
            proposals.append(Proposal(base_len=start, token_ids=tuple(answer), method=self.info.name))
        return proposals

    def close(self, session: DraftSession) -> None:
        pass


class TreeMethod:
    """Another method's chain as one path of a tree of random tokens, at random places among its siblings."""

    def __init__(self, method: DraftMethod, vocab_size: int, seed: int) -> None:
        self.info = method.info
        self.grammars = method.grammars
        self._method = method
        self._vocab_size = vocab_size
        self._rng = np.random.default_rng(seed)

    def open(self, session: DraftSession) -> None:
        self._method.open(session)

    def advance(self, session: DraftSession) -> bool:
        return self._method.advance(session)

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        return [self._grow(chain) for chain in self._method.propose(sessions)]

    def close(self, session: DraftSession) -> None:
        self._method.close(session)

    def _grow(self, chain: Proposal) -> Proposal:
        """Shared noise and deterministic drafts carry no laws, so the tree has none either."""
        token_ids: list[int] = []
        parents: list[int] = []
        parent = -1
        for token in chain.token_ids:
            level = [token, *self._random(int(self._rng.integers(_MAX_SIBLINGS + 1)))]
            if self._rng.random() < _REPEATED:
                level.append(token)
            order = self._rng.permutation(len(level)).tolist()
            first = len(token_ids)
            token_ids += [level[place] for place in order]
            parents += [parent] * len(level)
            if len(level) > 1 and self._rng.random() < _NEPHEW:
                token_ids += self._random(1)
                parents.append(first + order.index(1))
            parent = first + order.index(0)
        return Proposal(
            base_len=chain.base_len, token_ids=tuple(token_ids), method=chain.method, parents=tuple(parents)
        )

    def _random(self, count: int) -> list[int]:
        drawn: list[int] = self._rng.integers(self._vocab_size, size=count).tolist()
        return drawn


def _wanted(session: DraftSession) -> int:
    return session.step.num_draft_tokens if session.step else 0
