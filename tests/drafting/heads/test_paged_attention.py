"""EAGLE heads through the engine's paged attention, against the same head with transformers' eager attention.

Chains written in pieces, ragged batches with scattered blocks, and token trees. In eager mode each sequence is run
alone and whole, with a mask made here from who hangs below whom.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from outrider.drafting.heads.decoder import DecoderConfig
from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.layer import ATTENTION_NAME, PagedContext, register_attention
from outrider.engine.attention.ops import LayerShape, resolve_attention_ops
from outrider.engine.attention.paged_kv import PagedKVCache
from tests.drafting.heads import small_heads

BLOCK_SIZE, BLOCKS_PER_SEQUENCE = 4, 8

HEADS: dict[str, Callable[..., Any]] = {
    "eagle": small_heads.eagle_head,
    "eagle, two layers": lambda **kwargs: small_heads.eagle_head(num_layers=2, **kwargs),
    "eagle3": small_heads.eagle3_head,
    "eagle3, two layers, normed": lambda **kwargs: small_heads.eagle3_head(
        num_layers=2, norm_output=True, norm_before_residual=True, **kwargs
    ),
    "eagle3, qwen3": lambda **kwargs: small_heads.eagle3_head(model_type="qwen3", **kwargs),
}


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_attention()


@dataclass
class Session:
    """Rows of one session: tokens, features, and what each tree row hangs below (relative to the first row)."""

    token_ids: list[int]
    features: torch.Tensor
    block_ids: list[int]
    num_chain_rows: int
    parents: list[int] = field(default_factory=list)
    num_cached: int = 0

    def ancestors(self) -> torch.Tensor:
        """bool [T, T]: row attends to column."""
        num_rows = len(self.token_ids)
        allowed = torch.eye(num_rows, dtype=torch.bool)
        for row in range(1, num_rows):
            parent = row - 1 if row < self.num_chain_rows else self.parents[row - self.num_chain_rows]
            allowed[row] |= allowed[parent]
        return allowed

    def positions(self) -> list[int]:
        return [int(row.sum()) - 1 for row in self.ancestors()]


def sequences(lengths: Sequence[int], tree_parents: Sequence[Sequence[int]]) -> list[Session]:
    """`lengths` chain rows each, and then a tree."""
    generator = torch.Generator().manual_seed(8)
    order = torch.randperm(len(lengths) * BLOCKS_PER_SEQUENCE, generator=generator).tolist()
    made = []
    for index, (length, parents) in enumerate(zip(lengths, tree_parents, strict=True)):
        num_rows = length + len(parents)
        token_ids = torch.randint(small_heads.VOCAB, (num_rows,), generator=generator).tolist()
        features = torch.randn(num_rows, small_heads.HIDDEN, generator=generator)
        blocks = order[index * BLOCKS_PER_SEQUENCE : (index + 1) * BLOCKS_PER_SEQUENCE]
        made.append(Session(token_ids, features, blocks, length, list(parents)))
    return made


def eager(head: Any, sequence: Session) -> torch.Tensor:
    mask = torch.zeros(sequence.ancestors().shape).masked_fill(~sequence.ancestors(), float("-inf"))
    positions = torch.tensor([sequence.positions()])
    return head(torch.tensor([sequence.token_ids]), sequence.features[None], positions, mask[None, None])[0]


def make_cache(config: DecoderConfig, num_sequences: int) -> PagedKVCache:
    shape = LayerShape(
        "", config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim, None
    )
    return PagedKVCache(
        [shape] * config.num_hidden_layers,
        num_blocks=num_sequences * BLOCKS_PER_SEQUENCE,
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        ops=resolve_attention_ops("cpu", torch.device("cpu")),
    )


def paged_step(head: Any, cache: PagedKVCache, steps: Sequence[tuple[Session, int]]) -> list[torch.Tensor]:
    """The next `count` rows of each sequence in one forward."""
    session_rows, features = [], []
    for sequence, count in steps:
        start, end = sequence.num_cached, sequence.num_cached + count
        chain = max(0, min(end, sequence.num_chain_rows) - start)
        parents = [parent - start for parent in sequence.parents] if chain < count else []
        session_rows.append(
            SessionRows(sequence.token_ids[start:end], start, sequence.block_ids, count, chain, parents)
        )
        features.append(sequence.features[start:end])
        sequence.num_cached = end
    batch = build_batch(session_rows, BLOCK_SIZE)
    paged = PagedContext(resolve_attention_ops("cpu", torch.device("cpu")), batch, cache)
    found = head(batch.token_ids[None], torch.cat(features)[None], batch.position_ids[None], paged=paged)
    return list(found[0].split([count for _, count in steps]))


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_ragged_chains_in_pieces(name: str) -> None:
    """Three sequences of unequal length: ragged prefills, then steps of one and of several rows."""
    head = HEADS[name](attn_implementation=ATTENTION_NAME)
    lengths = [13, 6, 9]
    batch = sequences(lengths, [[], [], []])
    cache = make_cache(head.config.decoder, len(batch))
    pieces: list[list[torch.Tensor]] = [[], [], []]
    for counts in ([7, 1, 4], [1, 1, 1], [5, 4, 4]):
        for place, rows in enumerate(paged_step(head, cache, list(zip(batch, counts, strict=True)))):
            pieces[place].append(rows)
    reference = HEADS[name](attn_implementation="eager")
    for sequence, rows in zip(batch, pieces, strict=True):
        wanted = eager(reference, sequence)
        torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-5, rtol=0)
        torch.testing.assert_close(head.logits(torch.cat(rows)), reference.logits(wanted), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_trees_below_chains(name: str) -> None:
    """After a prefill, one step of both: a tree with branches below the last row, and beside it a plain chain."""
    head = HEADS[name](attn_implementation=ATTENTION_NAME)
    tree, chain = sequences([6, 8], [[5, 5, 6, 6, 7, 9], []])
    cache = make_cache(head.config.decoder, 2)
    before = paged_step(head, cache, [(tree, 5), (chain, 3)])
    after = paged_step(head, cache, [(tree, 7), (chain, 5)])
    reference = HEADS[name](attn_implementation="eager")
    for sequence, first, second in zip((tree, chain), before, after, strict=True):
        torch.testing.assert_close(torch.cat((first, second)), eager(reference, sequence), atol=1e-5, rtol=0)


@torch.no_grad()
def test_without_its_context_the_paged_attention_refuses() -> None:
    """A caller who forgets `paged` must not get attention without a past."""
    head = small_heads.eagle_head(attn_implementation=ATTENTION_NAME)
    with pytest.raises(TypeError, match="paged"):
        head(torch.tensor([[1, 2]]), torch.zeros(1, 2, small_heads.HIDDEN), torch.tensor([[0, 1]]))
