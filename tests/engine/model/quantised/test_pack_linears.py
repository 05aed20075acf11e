"""Heads packed in 4 bits: weights as near as by rounding, features and tokens nearly the head's; small heads stay."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from outrider.drafting.heads.eagle3 import Eagle3Config, Eagle3Head
from outrider.drafting.paged.paged_head import PagedHead
from outrider.engine.attention.batch import SessionRows
from outrider.engine.attention.layer import ATTENTION_NAME
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.model.coded_weights import code_kinds
from outrider.engine.model.quantised.pack_linears import coded
from outrider.engine.model.row_kernels import resolve_code_kernels
from tests.drafting.head_cases import DECODER

OPS = resolve_attention_ops("cpu", torch.device("cpu"))
WIDE = dataclasses.replace(
    DECODER, hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
    vocab_size=1500,
)  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 64), (5, 200), (70, 1)])
def test_no_group_is_further_off_than_by_rounding_to_its_largest(
    shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, shape[0])[:, None]
    weight[0] = 0.0
    weight = weight.bfloat16()
    codes = coded(weight)
    assert int(codes.numbers.min()) >= -8
    assert int(codes.numbers.max()) <= 7
    found, given = codes.dequantised(), weight.float()
    for start in range(0, shape[1], 32):
        part, ours = given[:, start : start + 32], found[:, start : start + 32]
        step = part.abs().amax(1, keepdim=True) / 7
        rounded = torch.where(step > 0, (part / step).round() * step, 0.0)
        error, limit = (ours - part).square().sum(1), (rounded - part).square().sum(1)
        # Beyond it only by what float16 takes from the scale.
        assert bool((error <= 1.01 * limit + 32 * (7 * step[:, 0] * 2**-10) ** 2).all())
    assert not found[0].any()
    monkeypatch.setattr("outrider.engine.model.quantised.pack_linears._SLAB_WEIGHTS", 1)
    assert torch.equal(coded(weight).numbers, codes.numbers)


def large_head() -> Eagle3Head:
    torch.manual_seed(3)
    head = Eagle3Head(
        Eagle3Config(WIDE, feature_layers=(1, 2, 3)),
        embedding=torch.randn(WIDE.vocab_size, WIDE.hidden_size),
        lm_head=torch.randn(WIDE.vocab_size, WIDE.hidden_size) / 8,
        attn_implementation=ATTENTION_NAME,
    )
    return head.eval().bfloat16()


@pytest.mark.skipif(
    resolve_code_kernels(OPS.row_backend, torch.bfloat16, torch.device("cpu")) is None,
    reason="this CPU has no kernels for codes (AVX512-BF16 or AVX2)",
)
def test_a_large_head_is_packed_and_drafts_nearly_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    head = large_head()
    packed = PagedHead(copy.deepcopy(head), OPS, torch.bfloat16, kv_cache_bytes=2**22, block_size=16)
    assert code_kinds(packed.head) in (["i4"], ["w4a8"])  # type: ignore[arg-type]
    monkeypatch.setattr("outrider.engine.model.quantised.pack_linears._LEAST_WEIGHTS", 10**9)
    plain = PagedHead(head, OPS, torch.bfloat16, kv_cache_bytes=2**22, block_size=16)
    assert code_kinds(plain.head) == []  # type: ignore[arg-type]
    rows = [SessionRows(list(range(40)), 0, [0, 1, 2], 40)]
    hidden = torch.randn(40, 3 * WIDE.hidden_size, generator=torch.Generator().manual_seed(5)).bfloat16()
    with torch.inference_mode():
        ours, theirs = (
            each.head.logits(each.forward(rows, each.head.fuse(hidden))).float() for each in (packed, plain)
        )
    assert float(torch.nn.functional.cosine_similarity(ours, theirs).min()) > 0.99
    assert int((ours.argmax(1) == theirs.argmax(1)).sum()) >= 28
