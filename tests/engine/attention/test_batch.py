"""Flattening sessions into one ragged forward, against a transcription that asks row by row."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.engine.attention.batch import SessionRows, build_batch

BLOCK_SIZE = 4


def random_session(rng: random.Random, *, is_single: bool) -> SessionRows:
    num_chain, num_nodes = (1, 0) if is_single else (rng.randint(1, 9), rng.choice([0, 0, rng.randint(1, 6)]))
    context_len = rng.randint(0, 20)
    count = num_chain + num_nodes
    num_blocks = -(-(context_len + count) // BLOCK_SIZE) + rng.randint(0, 2)
    return SessionRows(
        token_ids=[rng.randrange(1000) for _ in range(count)],
        context_len=context_len,
        block_ids=rng.sample(range(1000), num_blocks),
        num_logits_rows=rng.randint(0, count),
        num_chain_rows=num_chain if num_nodes else rng.choice([None, num_chain]),
        parents=[num_chain - 1 + rng.randint(0, node) for node in range(num_nodes)],
    )


def depth_of(rows: SessionRows, row: int) -> int:
    """Logical position of a row: walk up to the chain."""
    num_chain = len(rows.token_ids) if rows.num_chain_rows is None else rows.num_chain_rows
    depth = 0
    while row >= num_chain:
        row = rows.parents[row - num_chain]
        depth += 1
    return rows.context_len + row + depth


def test_against_a_row_by_row_transcription() -> None:
    rng = random.Random(7)
    for turn in range(200):
        # Batches of single rows are put together in another way.
        sessions = [random_session(rng, is_single=turn % 3 == 0) for _ in range(rng.randint(1, 5))]
        batch = build_batch(sessions, BLOCK_SIZE)
        tokens, positions, slots, wanted, starts = [], [], [], [], [0]
        for rows in sessions:
            count = len(rows.token_ids)
            for row in range(count):
                cache_index = rows.context_len + row
                tokens.append(rows.token_ids[row])
                positions.append(depth_of(rows, row))
                slots.append(rows.block_ids[cache_index // BLOCK_SIZE] * BLOCK_SIZE + cache_index % BLOCK_SIZE)
                if row >= count - rows.num_logits_rows:
                    wanted.append(starts[-1] + row)
            starts.append(starts[-1] + count)
        assert batch.token_ids.tolist() == tokens
        assert batch.position_ids.tolist() == positions
        assert batch.slot_mapping.tolist() == slots
        assert batch.logits_rows.tolist() == wanted
        assert batch.query_starts.tolist() == starts
        assert batch.context_lens.tolist() == [rows.context_len for rows in sessions]
        for index, rows in enumerate(sessions):
            num_chain = len(rows.token_ids) if rows.num_chain_rows is None else rows.num_chain_rows
            assert batch.tree_starts[index] == num_chain
            assert batch.block_tables[index, : len(rows.block_ids)].tolist() == list(rows.block_ids)
            tree = batch.parents[starts[index] + num_chain : starts[index + 1]]
            assert tree.tolist() == list(rows.parents[: len(tree)])


@pytest.mark.parametrize("token_ids", [[1], [1, 2]])
def test_types_are_what_the_kernels_take(token_ids: list[int]) -> None:
    batch = build_batch([SessionRows(token_ids, 0, [3], 1)], BLOCK_SIZE)
    for name in ("token_ids", "position_ids", "slot_mapping", "logits_rows"):
        assert getattr(batch, name).dtype == torch.int64
    for name in ("query_starts", "context_lens", "block_tables", "tree_starts", "parents"):
        assert getattr(batch, name).dtype == torch.int32


def test_one_row_may_be_a_tree_of_its_own() -> None:
    rows = SessionRows([7], 5, [3, 4], 1, num_chain_rows=0, parents=[-1])
    batch = build_batch([rows, SessionRows([8], 2, [9], 1)], BLOCK_SIZE)
    assert batch.tree_starts.tolist() == [0, 1]
    assert batch.parents.tolist() == [-1, 0]
    assert batch.position_ids.tolist() == [5, 2]


def test_an_empty_batch() -> None:
    batch = build_batch([], BLOCK_SIZE)
    assert batch.token_ids.tolist() == []
    assert batch.query_starts.tolist() == [0]
