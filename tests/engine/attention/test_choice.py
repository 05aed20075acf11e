"""What a sparse attention chooses: the best scores, of equal ones the earliest, among what a row sees."""

from __future__ import annotations

import itertools

import pytest
import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.choice import EVERYTHING, TopBlocks, TopKeys, VisibleKeys, by_head, choose
from outrider.engine.attention.layer import IndexerCall, PagedContext
from outrider.engine.attention.ops import LayerShape, resolve_attention_ops
from outrider.engine.attention.paged_kv import PagedKVCache
from outrider.kernels.index_scores.reference import index_scores
from outrider.kernels.paged_attention import cpu
from outrider.kernels.paged_attention.arguments import Scoring
from outrider.kernels.paged_attention.reference import visible_cache_indices

BLOCK_SIZE = 4


def batch_of_chains_and_a_tree() -> list[SessionRows]:
    tree = SessionRows([1] * 7, 5, [7, 2, 9], 7, num_chain_rows=2, parents=[1, 1, 2, 2, 5])
    return [SessionRows([1] * 3, 0, [4], 3), tree, SessionRows([1], 9, [0, 5, 3], 1)]


def test_visible_slots_are_those_that_attention_reads() -> None:
    sessions = batch_of_chains_and_a_tree()
    visible = VisibleKeys(build_batch(sessions, BLOCK_SIZE).attention_tables, BLOCK_SIZE)
    expected = []
    for rows in sessions:
        chain = len(rows.token_ids) if rows.num_chain_rows is None else rows.num_chain_rows
        parents = [0] * chain + list(rows.parents)
        for row in range(len(rows.token_ids)):
            indices = visible_cache_indices(row, rows.context_len, chain, parents, Scoring(1.0))
            expected.append(
                [rows.block_ids[index // BLOCK_SIZE] * BLOCK_SIZE + index % BLOCK_SIZE for index in indices]
            )
    assert visible.counts.tolist() == [len(slots) for slots in expected]
    for begin, end in ((0, 11), (3, 4), (5, 11)):
        found = visible.slots(begin, end)
        width = max(map(len, expected[begin:end]))
        assert found.tolist() == [slots + [-1] * (width - len(slots)) for slots in expected[begin:end]]


@pytest.mark.parametrize("num_chosen", [1, 3, 6, 50])
def test_the_best_are_chosen_and_of_equal_ones_the_earliest(num_chosen: int) -> None:
    """Against sorting, on few different scores, with some that are no numbers."""
    generator = torch.Generator().manual_seed(num_chosen)
    scores = torch.randint(-2, 3, (40, 11), generator=generator).float()
    scores[torch.rand(scores.shape, generator=generator) < 0.1] = torch.nan
    scores[torch.rand(scores.shape, generator=generator) < 0.05] = -torch.inf
    slots = torch.randint(0, 99, scores.shape, generator=generator).int()
    for row, count in zip(range(40), itertools.cycle(range(1, 12))):
        slots[row, count:] = -1
        scores[row, count:] = -torch.inf
    found = TopKeys(num_chosen).chosen(scores, slots).tolist()
    for row, ours in enumerate(found):
        places = [place for place in range(11) if slots[row, place] >= 0]
        rank = {place: -torch.inf if scores[row, place].isnan() else float(scores[row, place]) for place in places}
        best = sorted(sorted(places, key=lambda place: (-rank[place], place))[:num_chosen])
        assert [place for place, is_chosen in enumerate(ours) if is_chosen] == best


@pytest.mark.parametrize(("num_blocks", "num_local"), [(1, 0), (2, 1), (3, 2), (2, 3), (50, 1)])
def test_the_best_blocks_are_chosen_after_the_rows_own(num_blocks: int, num_local: int) -> None:
    """Against sorting blocks of 3 keys, on few different scores."""
    generator = torch.Generator().manual_seed(num_blocks)
    scores = torch.randint(-2, 3, (40, 11), generator=generator).float()
    slots = torch.randint(0, 99, scores.shape, generator=generator).int()
    for row, count in zip(range(40), itertools.cycle(range(1, 12))):
        slots[row, count:] = -1
        scores[row, count:] = -torch.inf
    found = TopBlocks(3, num_blocks, num_local).chosen(scores, slots).tolist()
    for row, ours in enumerate(found):
        count = int((slots[row] >= 0).sum())
        own = (count - 1) // 3
        value = {block: float(scores[row, 3 * block : 3 * block + 3].max()) for block in range(own + 1)}
        value |= dict.fromkeys(range(max(0, own - num_local + 1), own + 1), torch.inf)
        best = sorted(value, key=lambda block: (-value[block], block))[:num_blocks]
        expected = [place for place in range(count) if place // 3 in best]
        assert [place for place, is_chosen in enumerate(ours) if is_chosen] == expected


def choice_of(
    num_chosen: int, sessions: list[SessionRows], cache: torch.Tensor, queries: torch.Tensor
) -> list[list[int]]:
    """The chosen slots of each row."""
    tables = build_batch(sessions, BLOCK_SIZE).attention_tables
    weights, visible = torch.ones(queries.shape[:2])[:, None], VisibleKeys(tables, BLOCK_SIZE)
    choice = choose(queries[:, None], weights, cache, visible, TopKeys(num_chosen), index_scores, 1)
    assert choice.tables is not None
    ends = (choice.tables.context_lens + 1).tolist()
    return [row[:end] for row, end in zip(choice.tables.block_tables.tolist(), ends, strict=True)]


def test_a_rows_choice_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together, alone, and where few scores are computed at a time."""
    generator = torch.Generator().manual_seed(2)
    cache, queries = (
        torch.randn(10, 1, BLOCK_SIZE, 16, generator=generator),
        torch.randn(11, 2, 16, generator=generator),
    )
    sessions = batch_of_chains_and_a_tree()
    together = choice_of(4, sessions, cache, queries)
    assert max(map(len, together)) == 4
    assert choice_of(4, sessions[:1], cache, queries[:3]) == together[:3]
    assert choice_of(4, sessions[1:2], cache, queries[3:10]) == together[3:10]
    assert choice_of(4, sessions[2:], cache, queries[10:]) == together[10:]
    monkeypatch.setattr("outrider.engine.attention.choice._MAX_SCORES", 20)
    assert choice_of(4, sessions, cache, queries) == together


def test_a_context_no_longer_than_the_choice_is_attended_whole() -> None:
    ops = resolve_attention_ops("cpu", torch.device("cpu"))
    shape = LayerShape("layer", 2, 1, 16, 16, None, index_dim=16)
    cache = PagedKVCache([shape], num_blocks=2, block_size=4, dtype=torch.float32, device=torch.device("cpu"), ops=ops)
    batch = build_batch([SessionRows([1] * 3, 5, [1, 0], 3)], BLOCK_SIZE)
    call = IndexerCall(PagedContext(ops, batch, cache), 0)
    arguments = torch.randn(3, 1, 2, 16), torch.ones(3, 1, 2), torch.randn(3, 16)
    assert call.choose(*arguments, TopKeys(8)) is EVERYTHING
    assert call.choose(*arguments, TopKeys(7)).tables is not None


@pytest.mark.parametrize(("num_heads", "num_choices"), [(1, 1), (2, 2), (4, 2), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_that_is_chosen_has_the_bits_of_attention_without_a_choice(
    dtype: torch.dtype, num_heads: int, num_choices: int
) -> None:
    """A row that sees 300 keys beside one that sees more than it may choose."""
    generator = torch.Generator().manual_seed(4)
    keys = torch.randn(200, num_heads, BLOCK_SIZE, 24, generator=generator).to(dtype)
    values, query = keys[..., :16], torch.randn(5, 8, 24, generator=generator).to(dtype)
    order = torch.randperm(200, generator=generator).tolist()
    sessions = [SessionRows([1] * 3, 297, order[:75], 3), SessionRows([1] * 2, 398, order[75:175], 2)]
    tables = build_batch(sessions, BLOCK_SIZE).attention_tables
    index_cache = torch.randn(200, 1, BLOCK_SIZE, 16, generator=generator)
    queries, weights = torch.randn(5, num_choices, 2, 16, generator=generator), torch.ones(5, num_choices, 2)
    visible = VisibleKeys(tables, BLOCK_SIZE)
    choice = choose(queries, weights, index_cache, visible, TopKeys(300), index_scores, num_heads)
    assert choice.tables is not None
    dense = cpu.paged_attention(query, keys, values, tables, Scoring(0.3))
    by_heads = query.reshape(5 * num_heads, -1, 24)
    sparse = cpu.paged_attention(by_heads, by_head(keys), by_head(values), choice.tables, Scoring(0.3)).view(5, 8, 16)
    assert by_head(keys).data_ptr() == keys.data_ptr()
    assert torch.equal(sparse[:3], dense[:3])
    assert not torch.equal(sparse[3:], dense[3:])
