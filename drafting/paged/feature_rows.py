"""The rows that each session of a head has in its paged cache, kept up with committed tokens and hidden states.

Sessions with the same prompt prefix share rows. Rows built without some of the features are not shared. Missing
features (a cached prefix computed without them) shorten the head's context; they are not an error.

Not here: the head's forwards, and what its rows are (the nets in drafting/methods).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from outrider.drafting.growth.draft import Draft
from outrider.drafting.paged.paged_head import PagedModule
from outrider.drafting.session import DraftSession
from outrider.engine.attention.block_manager import BlockTable, OutOfBlocks

# rows; largest backlog that a proposal catches up with; more goes through `advance`, so that a long prompt does not
# delay other sessions' drafts
CATCH_UP_ROWS = 64


@dataclass
class SessionCache:
    """One session's rows: those of positions [first, end) are cached."""

    table: BlockTable
    first: int = 0
    end: int = 0

    @property
    def num_rows(self) -> int:
        return self.end - self.first


class FeatureRows:
    """All sessions' rows. Row i needs the target's state of position i and the tokens up to i + lookahead."""

    def __init__(self, paged: PagedModule, *, lookahead: int) -> None:
        """lookahead: 1 for EAGLE heads, which pair a state with the next token; 0 for heads that read states alone."""
        self._paged = paged
        self._lookahead = lookahead
        # A head for a shallow target may read one layer twice (4-layer targets: 2, 2, 1); the layer is sent once.
        layers = paged.head.feature_layers
        self.hidden_layers = tuple(dict.fromkeys(layers))
        self._layer_indices = [self.hidden_layers.index(layer) for layer in layers]
        self._caches: dict[int, SessionCache] = {}

    def of(self, session: DraftSession) -> SessionCache:
        return self._caches[id(session)]

    def open(self, session: DraftSession) -> None:
        session.take_unchanged_len()
        salt = f"{session.spec.cache_salt}/"
        if self._lookahead:
            salt += f"{session.token_ids[0]}"  # row 0 also depends on the first token, which is no row's next one
        # The last committed token's own state never has arrived when a proposal begins.
        keys = session.token_ids[self._lookahead : len(session.token_ids) - 1 + self._lookahead]
        table, num_cached = self._paged.blocks.open(keys, salt)
        self._caches[id(session)] = SessionCache(table, end=num_cached)
        session.hidden.begin_at(num_cached)

    def close(self, session: DraftSession) -> None:
        cache = self._caches.pop(id(session), None)
        if cache is not None:
            self._share(session, cache, min(cache.end, session.take_unchanged_len() - self._lookahead))
            self._paged.blocks.close(cache.table)

    def advance(self, session: DraftSession, limit: int, compute: Callable[[int], object]) -> bool:
        """Catches up by one piece of at most `limit` rows; returns whether a proposal could not do the rest.

        compute: computes the rows up to the position that it is given, for which room is made.
        """
        cache = self.of(session)
        end = self._align(session, cache)
        if end - cache.end <= CATCH_UP_ROWS:
            return False
        stop = min(cache.end + limit, end - 1)
        if not self._make_room(cache, stop - cache.first, spared=[cache]):
            return False
        compute(stop)
        self.keep(session, stop)
        return end - cache.end > CATCH_UP_ROWS

    def begin(self, drafts: Sequence[Draft], num_draft_rows: Sequence[int]) -> list[Draft]:
        """Makes room for the new drafts' rows; stops those that miss features or for which there is no room.

        num_draft_rows: most rows after the committed ones, per draft. Returns the drafts that go on.
        """
        caches = [self.of(draft.session) for draft in drafts]
        for draft, cache, num_rows in zip(drafts, caches, num_draft_rows, strict=True):
            if draft.nodes:
                continue
            session = draft.session
            end = self._align(session, cache)
            if end < len(session.token_ids) - 1:
                session.missing_hidden_from = cache.end - session.prompt_len
                draft.stop()
            elif not self._make_room(cache, end - cache.first + num_rows, spared=caches):
                draft.stop()
        return [draft for draft in drafts if draft.frontier]

    def keep(self, session: DraftSession, end: int) -> None:
        """Records that the rows of positions before `end` are cached."""
        cache = self.of(session)
        cache.end = end
        session.hidden.forget_before(end - self._lookahead)
        # Only the prompt's rows are shared, not the output's: shared rows cannot be truncated one by one.
        self._share(session, cache, min(end, session.prompt_len - 1))

    def states(self, session: DraftSession, start: int, end: int) -> torch.Tensor:
        """Returns the target's states [end - start, layers * width], in the order in which the head reads them."""
        rows = session.hidden.rows(start, end)
        if len(self._layer_indices) == len(self.hidden_layers):
            return rows
        by_layer = rows.view(len(rows), len(self.hidden_layers), -1)
        return by_layer[:, self._layer_indices].reshape(len(rows), -1)

    def fused(self, states: Sequence[torch.Tensor]) -> torch.Tensor:
        """Maps the states of all sessions, in order -> features [T, H]."""
        rows = torch.cat([part.to(self._paged.device, self._paged.dtype) for part in states])
        features: torch.Tensor = self._paged.head.fuse(rows)
        return features

    def _align(self, session: DraftSession, cache: SessionCache) -> int:
        """Truncates the cache to the rows still valid; returns the position after the last row that can be computed.

        Row i is valid as long as its tokens are. A head that looks ahead computes the last row again even if it was
        cached: a proposal starts from its output.
        """
        end = min(session.hidden.end, len(session.token_ids) - 1)
        lookahead = self._lookahead
        kept = min(cache.end, session.take_unchanged_len() - lookahead, len(session.token_ids) - 1 - lookahead)
        if session.hidden.first > cache.end or kept < cache.first:
            cache.first = cache.end = session.hidden.first
            self._paged.blocks.truncate(cache.table, 0)
        else:
            cache.end = max(cache.first, kept)
            self._paged.blocks.truncate(cache.table, cache.num_rows)
        return max(end, cache.end)

    def _share(self, session: DraftSession, cache: SessionCache, end: int) -> None:
        """Lets later sessions reuse the rows of positions [0, end)."""
        if cache.first == 0:
            self._paged.blocks.register(cache.table, session.token_ids[self._lookahead :], end)

    def _make_room(self, cache: SessionCache, num_rows: int, *, spared: Sequence[SessionCache]) -> bool:
        """Makes room, if needed by evicting the rows of sessions not `spared`; those restart from later features."""
        while True:
            try:
                self._paged.blocks.grow(cache.table, num_rows)
                return True
            except OutOfBlocks:
                kept = {id(other) for other in spared}
                victim = next(
                    (other for other in self._caches.values() if id(other) not in kept and other.table.block_ids), None
                )
                if victim is None:
                    return False
                self._paged.blocks.truncate(victim.table, 0)
                victim.first = victim.end
