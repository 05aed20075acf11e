"""EAGLE heads whose forwards are recorded: the bits of forwards that are not, whatever the batch, cache included."""

from __future__ import annotations

import copy
import dataclasses
import random
from typing import Any

import pytest
import torch

from outrider.drafting.heads.eagle import EagleConfig, EagleHead
from outrider.drafting.paged.paged_head import PagedHead
from outrider.engine.attention.batch import SessionRows
from outrider.engine.attention.layer import ATTENTION_NAME
from outrider.engine.attention.ops import resolve_attention_ops
from tests.drafting.head_cases import HIDDEN, NUM_TARGET_LAYERS, RECORDED, VOCAB_SIZE, WIDE, build_head

BLOCK_SIZE = 4
NUM_SESSIONS = 3
BLOCKS_EACH = 16


def build(kind: str) -> Any:
    if kind != "qwen3":
        return build_head(kind, ATTENTION_NAME, WIDE)
    torch.manual_seed(77)
    weights = {"embedding": torch.randn(VOCAB_SIZE, HIDDEN), "lm_head": torch.randn(VOCAB_SIZE, HIDDEN)}
    decoder = dataclasses.replace(WIDE, model_type="qwen3", num_hidden_layers=2)
    head = EagleHead(EagleConfig(decoder, NUM_TARGET_LAYERS), **weights, attn_implementation=ATTENTION_NAME)
    return head.eval()


def paged(head: Any, *, graphs: bool) -> PagedHead:
    ops = resolve_attention_ops("cpu", torch.device("cpu"))
    served = copy.deepcopy(head).to(torch.bfloat16)
    return PagedHead(served, ops, torch.bfloat16, kv_cache_bytes=2**20, block_size=BLOCK_SIZE, graphs=graphs)


def random_rows(generator: random.Random, lengths: list[int]) -> list[SessionRows]:
    """A few rows for each session after what it has: some as a chain, some as a tree, now and then a prompt."""
    rows = []
    for index, length in enumerate(lengths):
        count = generator.choice((1, 1, 2, 4, 20))
        token_ids = [generator.randrange(VOCAB_SIZE) for _ in range(count)]
        block_ids = list(range(index * BLOCKS_EACH, (index + 1) * BLOCKS_EACH))
        if count in (2, 4) and length > 0:
            parents = [-1, *(generator.randrange(-1, row) for row in range(1, count))]
            rows.append(SessionRows(token_ids, length, block_ids, count, num_chain_rows=0, parents=parents))
        else:
            rows.append(SessionRows(token_ids, length, block_ids, count if count < 20 else 0))
    return rows


@pytest.mark.parametrize("kind", [*RECORDED, "qwen3"])
def test_a_recorded_head_gives_the_bits_of_a_plain_one(kind: str) -> None:
    head = build(kind)
    recording, plain = paged(head, graphs=True), paged(head, graphs=False)
    generator = random.Random(5)
    torch.manual_seed(6)
    lengths = [0] * NUM_SESSIONS
    for _ in range(60):
        rows = random_rows(generator, lengths)
        features = torch.randn(sum(len(part.token_ids) for part in rows), HIDDEN).bfloat16()
        assert torch.equal(recording.forward(rows, features), plain.forward(rows, features))
        for ours, theirs in zip(recording._cache.layers, plain._cache.layers, strict=True):
            assert torch.equal(ours[0], theirs[0])
            assert torch.equal(ours[1], theirs[1])
        # Trees and most of the chains are drafts, which the next rows overwrite.
        kept = [len(part.token_ids) if not part.parents and generator.random() < 0.5 else 0 for part in rows]
        lengths = [
            (length + more) if length + more < BLOCK_SIZE * BLOCKS_EACH - 20 else 0
            for length, more in zip(lengths, kept, strict=True)
        ]
    recorded: Any = recording._recorded
    assert len(recorded._recorded) >= 4
    assert plain._recorded is None


@pytest.mark.parametrize("kind", [*RECORDED, "qwen3"])
def test_lean_modules_change_a_head_by_rounding_alone(kind: str) -> None:
    head = build(kind)
    served = paged(head, graphs=False)
    reference = copy.deepcopy(head)
    config = reference.model.config if kind == "mtp" else reference.hf_config
    config._attn_implementation = "eager"
    num_rows = 24
    token_ids = torch.randint(VOCAB_SIZE, (num_rows,))
    features = torch.randn(num_rows, HIDDEN).bfloat16()
    found = served.forward([SessionRows(token_ids.tolist(), 0, list(range(BLOCKS_EACH)), 0)], features)
    with torch.inference_mode():
        expected = reference(token_ids[None], features.float()[None], torch.arange(num_rows)[None])[0]
    assert (found.float() - expected).abs().max() < 0.05 * expected.abs().max()
