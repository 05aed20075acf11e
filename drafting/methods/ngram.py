"""Prompt lookup (Saxena 2023; vLLM's `ngram`): proposes what followed the last tokens at their previous occurrence.

The longest suffix of `prompt_lookup_max` down to `prompt_lookup_min` tokens with an earlier occurrence is looked up in
an index that grows with the session, so a proposal costs a few dictionary reads for any context. Of several occurrences
the latest counts: code repeats what is near.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.drafting.methods.guided import guided_chain
from outrider.drafting.session import DraftSession
from outrider.engine.sampling.grammar import GrammarCompiler
from outrider.shared.messages import DraftMethodInfo, Proposal

# tokens; longest proposal; the gateway has the same limit
MAX_DRAFT_TOKENS = 32


class _Index:
    """Records the latest position at which each n-gram of one session was followed by another token."""

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._sizes = range(lookup_max, lookup_min - 1, -1)
        self._positions: list[dict[tuple[int, ...], int]] = [{} for _ in self._sizes]
        self._token_ids: list[int] = []

    def update(self, token_ids: list[int]) -> None:
        """Indexes the session's tokens; starts over if indexed tokens were withdrawn."""
        known = len(self._token_ids)
        if token_ids[:known] != self._token_ids:
            for positions in self._positions:
                positions.clear()
            known = 0
        # An n-gram ending at `end` is indexed once a token follows it.
        for end in range(max(known, 1), len(token_ids)):
            for size, positions in zip(self._sizes, self._positions, strict=True):
                if end >= size:
                    positions[tuple(token_ids[end - size : end])] = end
        self._token_ids = list(token_ids)

    def continuation(self, tail: list[int], count: int) -> list[int]:
        """Returns the tokens that followed the latest occurrence of the last tokens, those of `tail` included."""
        longest = self._sizes[0]
        last = [*self._token_ids[-longest:], *tail][-longest:]
        for size, positions in zip(self._sizes, self._positions, strict=True):
            if len(last) < size:
                continue
            position = positions.get(tuple(last[-size:]))
            if position is not None:
                return _copy_forward([*self._token_ids, *tail] if tail else self._token_ids, position, count)
        return []


def _copy_forward(token_ids: list[int], position: int, count: int) -> list[int]:
    """Copies `count` tokens from `position` on; past the end the copy reads its own output, so a loop continues."""
    known = len(token_ids)
    copied: list[int] = []
    for offset in range(count):
        source = position + offset
        copied.append(token_ids[source] if source < known else copied[source - known])
    return copied


class NgramMethod:
    """The n-gram method. It is deterministic given the prefix: a point mass in rejection mode."""

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self.info = DraftMethodInfo(name="ngram", max_num_draft_tokens=MAX_DRAFT_TOKENS)
        self.grammars: GrammarCompiler | None = None
        self._lookup_min = prompt_lookup_min
        self._lookup_max = prompt_lookup_max
        self._indexes: dict[int, _Index] = {}

    def open(self, session: DraftSession) -> None:
        self._indexes[id(session)] = _Index(self._lookup_min, self._lookup_max)

    def advance(self, session: DraftSession) -> bool:
        self._indexes[id(session)].update(session.token_ids)
        return False

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        return [self._propose(session) for session in sessions]

    def close(self, session: DraftSession) -> None:
        self._indexes.pop(id(session), None)

    def _propose(self, session: DraftSession) -> Proposal:
        index = self._indexes[id(session)]
        index.update(session.token_ids)
        count = min(session.step.num_draft_tokens, MAX_DRAFT_TOKENS) if session.step else 0
        if session.grammar is None:
            token_ids = index.continuation([], count)
        else:
            token_ids = guided_chain(session.grammar, session.output_token_ids, count, index.continuation)
        return Proposal(base_len=session.committed_len, token_ids=tuple(token_ids), method=self.info.name)
