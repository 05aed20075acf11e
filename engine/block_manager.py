"""Who owns which KV block: allocation, prefix caching, freeing. Numbers only: no torch, no KV data.

A block holds `block_size` consecutive positions of one session. Full blocks of committed tokens are entered in the
prefix cache under a hash of everything before them (and of the session's cache salt); a session that starts with the
same tokens shares them by reference count. A block that nobody refers to but that is still in the prefix cache stays
until it is needed (least recently freed first).

Draft tokens are never entered: a block is registered only up to the committed, computed length.
"""

from __future__ import annotations

import hashlib
import struct
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field


class OutOfBlocks(Exception):
    """No block is free; the caller preempts a session or waits."""


class IntegrityError(Exception):
    """The bookkeeping contradicts itself: a bug."""


@dataclass
class BlockTable:
    """The blocks of one session, in order of position."""

    cache_salt: str = ""
    block_ids: list[int] = field(default_factory=list)
    # Hashes of the leading full blocks that are registered (or were found) in the prefix cache.
    block_hashes: list[bytes] = field(default_factory=list)


class BlockManager:
    """Half-open ranges; every method leaves `check_integrity` true."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        # Unreferenced blocks that the prefix cache still knows, oldest first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._evictable)

    def open(self, token_ids: Sequence[int], cache_salt: str = "") -> tuple[BlockTable, int]:
        """A table that holds the longest cached prefix of `token_ids`, and that prefix's length.

        At least the last token is left to compute: its logits are needed.
        """
        table = BlockTable(cache_salt=cache_salt)
        self._tables[id(table)] = table
        if self._prefix_caching:
            for block_hash in self._hashes(table, token_ids, (len(token_ids) - 1) // self.block_size):
                block_id = self._block_of_hash.get(block_hash)
                if block_id is None:
                    break
                self._take(block_id)
                table.block_ids.append(block_id)
                table.block_hashes.append(block_hash)
        return table, len(table.block_ids) * self.block_size

    def can_grow(self, table: BlockTable, num_positions: int) -> bool:
        return self._blocks_for(num_positions) - len(table.block_ids) <= self.num_free_blocks

    def grow(self, table: BlockTable, num_positions: int) -> None:
        """Makes room for positions [0, num_positions). Raises OutOfBlocks and then changes nothing."""
        missing = self._blocks_for(num_positions) - len(table.block_ids)
        if missing > self.num_free_blocks:
            raise OutOfBlocks(f"{missing} blocks wanted, {self.num_free_blocks} free")
        for _ in range(missing):
            table.block_ids.append(self._allocate())

    def truncate(self, table: BlockTable, num_positions: int) -> int:
        """Gives back the blocks past positions [0, num_positions); returns how many positions are still valid.

        Fewer than asked for when the cut goes through a block that others or the prefix cache may read: what comes
        after the cut will be written anew, so the whole block is given back and its positions are computed again.
        """
        keep = self._blocks_for(num_positions)
        if (
            num_positions % self.block_size
            and keep <= len(table.block_ids)
            and self._is_shared(table.block_ids[keep - 1])
        ):
            keep -= 1
            num_positions = keep * self.block_size
        for block_id in reversed(table.block_ids[keep:]):
            self._release(block_id)
        del table.block_ids[keep:]
        del table.block_hashes[num_positions // self.block_size :]
        return num_positions

    def _is_shared(self, block_id: int) -> bool:
        return self._ref_counts[block_id] > 1 or block_id in self._hash_of_block

    def register(self, table: BlockTable, token_ids: Sequence[int], num_computed: int) -> None:
        """Enters the full blocks of committed tokens [0, num_computed) in the prefix cache."""
        if not self._prefix_caching:
            return
        num_full = num_computed // self.block_size
        known = len(table.block_hashes)
        if num_full <= known:
            return
        for index, block_hash in enumerate(self._hashes(table, token_ids, num_full, start=known), start=known):
            block_id = table.block_ids[index]
            if block_hash not in self._block_of_hash and block_id not in self._hash_of_block:
                self._block_of_hash[block_hash] = block_id
                self._hash_of_block[block_id] = block_hash
            table.block_hashes.append(block_hash)

    def close(self, table: BlockTable) -> None:
        """Frees everything the table holds; registered blocks stay cached until their room is needed."""
        self.truncate(table, 0)
        self._tables.pop(id(table), None)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix; sessions keep their own blocks."""
        self._block_of_hash.clear()
        self._hash_of_block.clear()
        self._free.extend(self._evictable)
        self._evictable.clear()

    def check_integrity(self) -> None:
        """Raises IntegrityError unless every block is exactly one of: referenced, free, evictable."""
        counts = [0] * self.num_blocks
        for table in self._tables.values():
            for block_id in table.block_ids:
                counts[block_id] += 1
        if counts != self._ref_counts:
            raise IntegrityError(f"reference counts {self._ref_counts} but tables hold {counts}")
        free, evictable = set(self._free), set(self._evictable)
        if len(free) != len(self._free) or free & evictable:
            raise IntegrityError("a block is free twice")
        for block_id in range(self.num_blocks):
            if (counts[block_id] == 0) != (block_id in free or block_id in evictable):
                raise IntegrityError(f"block {block_id}: {counts[block_id]} references, free: {block_id in free}")
        for block_hash, block_id in self._block_of_hash.items():
            if self._hash_of_block.get(block_id) != block_hash:
                raise IntegrityError(f"block {block_id} is cached under a hash that it does not carry")
        if len(self._hash_of_block) != len(self._block_of_hash) or not evictable <= set(self._hash_of_block):
            raise IntegrityError("the prefix cache's two maps differ")

    def _blocks_for(self, num_positions: int) -> int:
        return -(-num_positions // self.block_size)

    def _allocate(self) -> int:
        if self._free:
            block_id = self._free.pop()
        else:
            block_id, _ = self._evictable.popitem(last=False)
            del self._block_of_hash[self._hash_of_block.pop(block_id)]
        self._ref_counts[block_id] = 1
        return block_id

    def _take(self, block_id: int) -> None:
        if self._ref_counts[block_id] == 0:
            del self._evictable[block_id]
        self._ref_counts[block_id] += 1

    def _release(self, block_id: int) -> None:
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] == 0:
            if block_id in self._hash_of_block:
                self._evictable[block_id] = None
            else:
                self._free.append(block_id)

    def _hashes(self, table: BlockTable, token_ids: Sequence[int], num_blocks: int, start: int = 0) -> list[bytes]:
        """Chained hashes of blocks [start, num_blocks): each covers all tokens before it and the salt."""
        previous = table.block_hashes[start - 1] if start else table.cache_salt.encode()
        hashes = []
        for index in range(start, num_blocks):
            block = token_ids[index * self.block_size : (index + 1) * self.block_size]
            previous = hashlib.blake2b(
                previous + struct.pack(f"<{len(block)}q", *block), digest_size=16, person=b"outrider"
            ).digest()
            hashes.append(previous)
        return hashes
