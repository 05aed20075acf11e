"""KV block bookkeeping: allocation, prefix caching, freeing. Block ids only: no torch, no KV data.

A block holds `block_size` consecutive positions of one session. Full blocks of committed tokens are registered in the
prefix cache under a hash of all tokens up to their end and of the session's cache salt; sessions that start with the
same tokens share them by reference count. Unreferenced registered blocks are evicted when needed, least recently freed
first. Draft tokens are never registered.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outrider.engine.errors import IntegrityError


class OutOfBlocks(Exception):
    """Too few free blocks; the caller preempts a session or waits."""


@dataclass
class BlockTable:
    """The blocks of one session, in order of position."""

    cache_salt: str = ""
    block_ids: list[int] = field(default_factory=list)
    # Hashes of the leading full blocks that are in the prefix cache.
    block_hashes: list[bytes] = field(default_factory=list)


def slots_of(block_ids: Sequence[int], positions: Iterable[int], block_size: int) -> list[int]:
    """Returns where in the cache these positions of a session are."""
    return [block_ids[position // block_size] * block_size + position % block_size for position in positions]


class BlockManager:
    """Allocates, shares and frees KV blocks. Ranges are half-open; every method leaves `check_integrity` true."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._ref_counts = [0] * num_blocks
        self._free: list[int] = list(range(num_blocks - 1, -1, -1))
        self._block_of_hash: dict[bytes, int] = {}
        self._hash_of_block: dict[int, bytes] = {}
        # Unreferenced blocks in the prefix cache, oldest first.
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._tables: dict[int, BlockTable] = {}

    @property
    def num_free_blocks(self) -> int:
        return len(self._free) + len(self._evictable)

    def open(
        self, token_ids: Sequence[int], cache_salt: str = "", may_end: Callable[[bytes], bool] = lambda _hash: True
    ) -> tuple[BlockTable, int]:
        """Returns a table with the longest cached prefix of `token_ids`, and that prefix's length in tokens.

        Always leaves the last token to compute, since its logits are needed. may_end: whether a prefix may end with the
        block that has this hash.
        """
        table = BlockTable(cache_salt=cache_salt)
        self._tables[id(table)] = table
        if self.prefix_caching:
            hashes = self._hashes(table, token_ids, (len(token_ids) - 1) // self.block_size)
            found = list(itertools.takewhile(self._block_of_hash.__contains__, hashes))
            while found and not may_end(found[-1]):
                found.pop()
            for block_hash in found:
                block_id = self._block_of_hash[block_hash]
                self._take(block_id)
                table.block_ids.append(block_id)
                table.block_hashes.append(block_hash)
        return table, len(table.block_ids) * self.block_size

    def can_grow(self, table: BlockTable, num_positions: int) -> bool:
        return self._blocks_for(num_positions) - len(table.block_ids) <= self.num_free_blocks

    def grow(self, table: BlockTable, num_positions: int) -> None:
        """Allocates blocks for positions [0, num_positions). Raises OutOfBlocks, leaving the table unchanged."""
        missing = self._blocks_for(num_positions) - len(table.block_ids)
        if missing > self.num_free_blocks:
            raise OutOfBlocks(f"{missing} blocks needed, {self.num_free_blocks} free")
        for _ in range(missing):
            table.block_ids.append(self._allocate())

    def truncate(self, table: BlockTable, num_positions: int) -> int:
        """Frees the blocks past positions [0, num_positions); returns the number of positions still valid.

        That is fewer than num_positions if the cut is inside a block that is shared or cached: positions after the cut
        will be overwritten, so the whole block is released and its positions are computed again.
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
        """Registers the full blocks of committed tokens [0, num_computed) in the prefix cache."""
        if not self.prefix_caching:
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
        """Frees all blocks of the table; registered ones stay cached until evicted."""
        self.truncate(table, 0)
        self._tables.pop(id(table), None)

    def forget(self) -> None:
        """Empties the prefix cache: what its blocks hold is not found again. Open tables keep their blocks."""
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._block_of_hash.clear()
        self._hash_of_block.clear()

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
                raise IntegrityError(f"block {block_id} is cached under another block's hash")
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
        """Returns chained hashes of blocks [start, num_blocks): each covers all tokens up to its end, and the salt."""
        previous = table.block_hashes[start - 1] if start else table.cache_salt.encode()
        hashes = []
        for index in range(start, num_blocks):
            block = token_ids[index * self.block_size : (index + 1) * self.block_size]
            previous = hashlib.blake2b(
                previous + struct.pack(f"<{len(block)}q", *block), digest_size=16, person=b"outrider"
            ).digest()
            hashes.append(previous)
        return hashes
