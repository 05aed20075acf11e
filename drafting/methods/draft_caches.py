"""Caches of a draft model's sessions: committed tokens' keys and values, and recurrent states.

The next forward begins at the end of a cache. In a model with recurrent layers (draft_states) a cache can be cut only
where a state is left. Not here: forwards, and what they draft (draft_model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.drafting.methods.draft_states import DraftState, DraftStates
from outrider.drafting.session import DraftSession
from outrider.drafting.vocabulary.mapping import DraftIds, VocabularyMap
from outrider.engine.attention.block_manager import BlockManager, BlockTable, OutOfBlocks
from outrider.engine.recurrent.rows import StateRows
from outrider.engine.recurrent.states import RecurrentStates
from outrider.engine.recurrent.table import OutOfSlots
from outrider.engine.sampling.prefixes import common_prefix_len


@dataclass
class DraftCache:
    """One session's cache, in draft ids: the committed tokens, and those whose KV is cached, a chain's included.

    recurrent: the state at the position where the cache ends; None: the model has no recurrent layers.
    """

    table: BlockTable
    committed: DraftIds
    cached_ids: list[int] = field(default_factory=list)
    recurrent: DraftState | None = None


class DraftCaches:
    """The caches of all sessions."""

    def __init__(self, blocks: BlockManager, states: RecurrentStates | None) -> None:
        self.blocks = blocks
        self.recurrent = DraftStates(states) if states is not None else None
        self._open: dict[int, DraftCache] = {}

    def open(self, session: DraftSession, vocabulary: VocabularyMap | None) -> None:
        committed = DraftIds(vocabulary)
        committed.follow(session)
        cache = DraftCache(BlockTable(cache_salt=session.spec.cache_salt), committed)
        self._find_prefix(cache)
        self._open[id(session)] = cache

    def of(self, session: DraftSession) -> DraftCache:
        """Returns the cache of an open session."""
        return self._open[id(session)]

    def close(self, session: DraftSession) -> None:
        cache = self._open.pop(id(session), None)
        if cache is not None:
            self._free(cache)

    def cut_back(self, session: DraftSession, cache: DraftCache) -> None:
        """Truncates the cache to the committed tokens it agrees with; the last of them is always recomputed."""
        unchanged_len = cache.committed.follow(session)
        ids = cache.committed.ids
        agreed = min(unchanged_len, len(cache.cached_ids))
        agreed += common_prefix_len(cache.cached_ids[agreed:], ids[agreed:])
        agreed = self.blocks.truncate(cache.table, min(agreed, max(0, len(ids) - 1)))
        if self.recurrent is not None and cache.recurrent is not None:
            while (position := self.recurrent.rewind(cache.recurrent, agreed)) < agreed:
                agreed = self.blocks.truncate(cache.table, position)
        del cache.cached_ids[agreed:]
        if self.recurrent is not None and not cache.cached_ids:
            self._free(cache)
            self._find_prefix(cache)

    def grow(
        self, cache: DraftCache, num_positions: int, *, spared: Sequence[DraftCache], unmoved: Sequence[DraftCache] = ()
    ) -> bool:
        """Makes room, if needed by evicting the caches of sessions not `spared`, which are recomputed.

        For recurrent states only the `unmoved` are spared: each session at rest holds one slot, so in a batch of spared
        sessions there might be no free slot left.
        """
        while True:
            try:
                self.blocks.grow(cache.table, num_positions)
                if self.recurrent is not None and cache.recurrent is not None:
                    self.recurrent.reserve(cache.recurrent)
                return True
            except OutOfBlocks:
                victim = self._victim(spared)
            except OutOfSlots:
                victim = self._victim(spared) or self._victim([*unmoved, cache], newest=True)
            if victim is None:
                return False
            self.blocks.truncate(victim.table, 0)
            victim.cached_ids.clear()
            if self.recurrent is not None and victim.recurrent is not None:
                self.recurrent.evict(victim.recurrent)

    def end_of_piece(self, start: int, num_ids: int, most: int) -> int:
        """Returns the end of a piece of at most `most` tokens that begins at `start`.

        It ends before the last token, and with recurrent layers at a block's end, since only states there can be shared
        with other sessions.
        """
        end, size = min(start + most, num_ids - 1), self.blocks.block_size
        return end if self.recurrent is None or end // size * size <= start else end // size * size

    def state_rows(self, cache: DraftCache, start: int, num_committed: int) -> StateRows | None:
        """Returns the state rows of a forward from `start` on; None without recurrent layers."""
        if self.recurrent is None or cache.recurrent is None:
            return None
        return self.recurrent.rows(cache.recurrent, start, num_committed)

    def _find_prefix(self, cache: DraftCache) -> None:
        """Opens the table, and the state, at the longest cached prefix of the committed tokens."""
        ids, salt = cache.committed.ids, cache.table.cache_salt
        if self.recurrent is None:
            cache.table, num_cached = self.blocks.open(ids, salt)
        else:
            cache.table, num_cached = self.blocks.open(ids, salt, self.recurrent.table.has_snapshot)
            cache.recurrent = self.recurrent.open(cache.table.block_hashes)
        cache.cached_ids = ids[:num_cached]

    def _free(self, cache: DraftCache) -> None:
        self.blocks.close(cache.table)
        if self.recurrent is not None and cache.recurrent is not None:
            self.recurrent.close(cache.recurrent)

    def _victim(self, spared: Sequence[DraftCache], *, newest: bool = False) -> DraftCache | None:
        kept = {id(other) for other in spared}
        holders = [each for each in self._open.values() if id(each) not in kept and each.table.block_ids]
        return holders[-1 if newest else 0] if holders else None
