"""Prompt lookup (Saxena 2023; vLLM's `ngram`): what followed the last tokens when they stood here before.

The longest suffix of `prompt_lookup_max` down to `prompt_lookup_min` tokens that occurred earlier is looked up in an
index that grows with the session, so a proposal costs a few dictionary reads whatever the context. Of several
earlier places the latest counts: code repeats what is near.
"""

from __future__ import annotations

from collections.abc import Sequence

from drafter_service.session import DraftSession
from shared.messages import DraftMethodInfo, Proposal

# Longest proposal; the gateway never asks for more.
MAX_DRAFT_TOKENS = 32


class _Index:
    """Latest place after which each n-gram of one session was followed by another token."""

    def __init__(self, lookup_min: int, lookup_max: int) -> None:
        self._sizes = range(lookup_max, lookup_min - 1, -1)
        self._places: list[dict[tuple[int, ...], int]] = [{} for _ in self._sizes]
        self._token_ids: list[int] = []

    def update(self, token_ids: list[int]) -> None:
        """Takes up the session's tokens; starts anew if what was indexed has been taken back."""
        known = len(self._token_ids)
        if token_ids[:known] != self._token_ids:
            for places in self._places:
                places.clear()
            known = 0
        # The n-gram that ends at `end` is entered once a token follows it.
        for end in range(max(known, 1), len(token_ids)):
            for size, places in zip(self._sizes, self._places, strict=True):
                if end >= size:
                    places[tuple(token_ids[end - size : end])] = end
        self._token_ids = list(token_ids)

    def continuation(self, count: int) -> list[int]:
        token_ids = self._token_ids
        for size, places in zip(self._sizes, self._places, strict=True):
            if len(token_ids) < size:
                continue
            place = places.get(tuple(token_ids[-size:]))
            if place is not None:
                return _copy_forward(token_ids, place, count)
        return []


def _copy_forward(token_ids: list[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on; past the end the copy reads what it has itself just written (a loop goes on)."""
    known = len(token_ids)
    copied: list[int] = []
    for offset in range(count):
        source = place + offset
        copied.append(token_ids[source] if source < known else copied[source - known])
    return copied


class NgramMethod:
    """Deterministic given the prefix: a point mass in rejection mode."""

    def __init__(self, *, prompt_lookup_min: int, prompt_lookup_max: int) -> None:
        self.info = DraftMethodInfo(name="ngram", max_num_draft_tokens=MAX_DRAFT_TOKENS)
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
        return Proposal(
            base_len=session.committed_len, token_ids=tuple(index.continuation(count)), method=self.info.name
        )
