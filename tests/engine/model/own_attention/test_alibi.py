"""Linear biases as elements of queries and keys: the product is the bias, at every position that is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from outrider.engine.attention.batch import SessionRows, build_batch
from outrider.engine.attention.layer import PagedContext
from outrider.engine.attention.ops import resolve_attention_ops
from outrider.engine.model.guards import resolve_kv_codes
from outrider.engine.model.own_attention.alibi import add_positions
from tests.engine.tiny_models import SERVED, save_tiny_model

OPS = resolve_attention_ops("reference", torch.device("cpu"))
SLOPES = torch.tensor([0.5, 2**-0.5, 2 ** -(8 / 28), 0.00390625])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("start", [0, 250, 2040, 65_500])
def test_the_further_elements_are_the_bias(dtype: torch.dtype, start: int) -> None:
    """transformers' own biases in bfloat16 are a hundred positions off at 65,500."""
    batch = build_batch([SessionRows([5] * 36, start, list(range(5000)), 1)], 16)
    query, key = torch.zeros(1, 4, 36, 8, dtype=dtype), torch.zeros(1, 1, 36, 8, dtype=dtype)
    longer_query, longer_key = add_positions(PagedContext(OPS, batch), query, key, SLOPES)
    assert longer_query.dtype == longer_key.dtype == dtype
    found = (longer_query.double() @ longer_key.double().transpose(2, 3))[0]
    expected = SLOPES.double()[:, None, None] * torch.arange(start, start + 36).double()
    torch.testing.assert_close(found, expected.expand_as(found), rtol=2**-22, atol=0)


def test_positions_are_not_cached_in_8_bits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = save_tiny_model(*SERVED["bloom"], tmp_path)
    config = transformers.AutoConfig.from_pretrained(folder)
    assert resolve_kv_codes(str(folder), config, "int8") is None
    assert "its attention caches the positions of keys" in caplog.text
