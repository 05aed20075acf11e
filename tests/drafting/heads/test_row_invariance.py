"""After engine.model.row_invariance, a row's bits do not depend on the number or the place of other rows in the
batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.layer import ATTENTION_NAME, PagedContext, register_attention
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.model.row_invariance import make_row_invariant
from tests.drafting.heads import small_heads
from tests.drafting.heads.test_paged_attention import BLOCK_SIZE, make_cache

DTYPES = [torch.float32, torch.bfloat16]
# Around the sizes where kernels change their way: one row, a vector, more than a tile.
COUNTS = [1, 2, 3, 5, 8, 17, 33, 70]


@pytest.fixture(params=[1, 2])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def medusa_rows(shares_lm_head: bool) -> Callable[[torch.dtype], Callable[[torch.Tensor], torch.Tensor]]:
    def build(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        heads = small_heads.medusa_heads(shares_lm_head=shares_lm_head).to(dtype)
        make_row_invariant(heads)
        return lambda hidden: heads(hidden.to(dtype))

    return build


def mlp_rows(tie_weights: bool) -> Callable[[torch.dtype], Callable[[torch.Tensor], torch.Tensor]]:
    def build(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        head = small_heads.mlp_speculator(tie_weights=tie_weights).to(dtype)
        make_row_invariant(head)

        def run(hidden: torch.Tensor) -> torch.Tensor:
            state = head.start(hidden.to(dtype))
            all_logits = []
            for step in range(3):
                token_ids = (hidden[:, step] * 1000).long() % small_heads.VOCAB
                state, logits = head.step(state, token_ids, step)
                all_logits.append(logits)
            return torch.stack(all_logits, 1)

        return run

    return build


def eagle_rows(make_head: Callable[..., Any]) -> Callable[[torch.dtype], Callable[[torch.Tensor], torch.Tensor]]:
    """Every row is a session of its own with an empty cache: the attention is paged, the logits are the head's."""

    def build(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
        register_attention()
        head = make_head(attn_implementation=ATTENTION_NAME).to(dtype)
        make_row_invariant(head)
        ops = resolve_attention_ops("cpu", torch.device("cpu"))

        def run(hidden: torch.Tensor) -> torch.Tensor:
            num_rows = hidden.shape[0]
            token_ids = ((hidden[:, 0] * 1000).long() % small_heads.VOCAB).tolist()
            batch = build_batch([SessionRows([token_ids[i]], 0, [i], 1) for i in range(num_rows)], BLOCK_SIZE)
            cache = make_cache(head.config.decoder, num_rows)
            cache.layers = [(key.to(dtype), value.to(dtype)) for key, value in cache.layers]
            features = head.fuse(hidden.repeat(1, len(head.feature_layers)).to(dtype))[None]
            context = PagedContext(ops, batch, cache)
            return head.logits(head(batch.token_ids[None], features, batch.position_ids[None], paged=context)[0])

        return run

    return build


HEADS = {
    "medusa": medusa_rows(False),
    "medusa, one output head": medusa_rows(True),
    "mlp_speculator": mlp_rows(False),
    "mlp_speculator, tied": mlp_rows(True),
    "eagle": eagle_rows(small_heads.eagle_head),
    "eagle3": eagle_rows(small_heads.eagle3_head),
    "eagle3, all norms": eagle_rows(
        lambda **kwargs: small_heads.eagle3_head(fc_norm=True, norm_output=True, num_layers=2, **kwargs)
    ),
}


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_a_rows_logits_do_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    run = HEADS[name](dtype)
    hidden = small_heads.random(max(COUNTS), small_heads.HIDDEN, seed=77)
    alone = torch.cat([run(hidden[row : row + 1]) for row in range(9)])
    assert bool(torch.isfinite(alone).all())
    for count in COUNTS:
        order = torch.randperm(max(COUNTS), generator=torch.Generator().manual_seed(count))[:count]
        together = run(hidden[order])
        for place, row in enumerate(order.tolist()):
            if row < 9:
                assert torch.equal(together[place], alone[row]), f"{count} rows, row {row} at {place}"


@pytest.mark.parametrize("name", HEADS)
@torch.no_grad()
def test_the_change_is_one_of_rounding_only(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = small_heads.random(6, small_heads.HIDDEN, seed=78)
    invariant = HEADS[name](torch.float32)(hidden)
    monkeypatch.setattr(f"{__name__}.make_row_invariant", lambda module: None)
    torch.testing.assert_close(invariant, HEADS[name](torch.float32)(hidden), atol=1e-5, rtol=0)
