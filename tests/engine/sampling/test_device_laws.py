"""Laws that the device makes of rows of logits, and tokens drawn from them, against the host's float64 laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.drafting.growth.laws import sparse_law
from outrider.engine.sampling.device_laws import LawDraws, draw_from_laws
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.kernels.sampling_support.transforms import Transforms
from outrider.shared.messages import LAW_SIZE, LAW_TOTAL, SparseLaw
from outrider.shared.sampling_params import SamplingParams
from tests.engine.sampling.law_cases import expect_equal_laws
from tests.kernels.sampling.sampling_cases import FIELDS, random_logits, transforms
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

_FIELDS = [fields for fields in FIELDS if fields[0] > 0.0]


def _draw(logits: torch.Tensor, fields: Transforms, places: list[int]) -> tuple[LawDraws, list[SparseLaw]]:
    drawn = draw_from_laws(logits, fields, torch.tensor(places, device=device()))
    laws = []
    for token_ids, counts in zip(drawn.law_token_ids.tolist(), drawn.law_counts.tolist(), strict=True):
        held = [(token_id, count) for token_id, count in zip(token_ids, counts, strict=True) if count]
        laws.append(SparseLaw(tuple(token_id for token_id, _ in held), tuple(count for _, count in held)))
    return drawn, laws


def _by_host(logits: torch.Tensor) -> list[SparseLaw]:
    rows = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf).cpu().numpy()
    params = (SamplingParams(temperature=t, top_k=k, top_p=p, min_p=m) for t, k, p, m in _FIELDS)
    return [
        sparse_law(LogitsProcessor(each, (), ()).log_weights(row, ())) for each, row in zip(params, rows, strict=True)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "spread"), [(600, 3.0), (600, 0.5), (20, 1.0)])
def test_laws_are_those_of_the_host(vocab_size: int, spread: float, dtype: torch.dtype) -> None:
    logits = random_logits(len(_FIELDS), vocab_size, dtype, spread)
    logits[:, 3::5] = -torch.inf
    logits[::2, 4] = torch.nan
    drawn, found = _draw(logits, transforms(_FIELDS), [LAW_TOTAL // 2] * len(_FIELDS))
    assert drawn.law_counts.shape == (len(_FIELDS), LAW_SIZE)
    sizes = set()
    for mine, theirs in zip(found, _by_host(logits), strict=True):
        expect_equal_laws(mine, theirs)
        # In bfloat16 many are equal, and the order of equals is the host's too.
        common = min(len(mine.token_ids), len(theirs.token_ids)) - 2
        assert mine.token_ids[:common] == theirs.token_ids[:common]
        sizes.add(len(mine.token_ids))
    assert len(sizes) > 3


def test_every_token_is_drawn_at_the_places_of_its_count() -> None:
    fields = (0.75, 10, 1.0, 0.0)
    row = random_logits(1, 100, torch.float32)
    _, (law,) = _draw(row, transforms([fields]), [0])
    assert len(law.token_ids) == 10
    ends = np.cumsum(law.counts)
    places = [place for end, count in zip(ends.tolist(), law.counts, strict=True) for place in (end - count, end - 1)]
    drawn, _ = _draw(row.expand(len(places), -1).contiguous(), transforms([fields] * len(places)), places)
    assert drawn.tokens.tolist() == [token_id for token_id in law.token_ids for _ in range(2)]
    shares = [count / LAW_TOTAL for count in law.counts for _ in range(2)]
    assert drawn.shares.tolist() == pytest.approx(shares)


def test_a_row_without_a_number_has_neither_token_nor_law() -> None:
    logits = random_logits(3, 50, torch.float32)
    logits[0], logits[2] = torch.nan, -torch.inf
    drawn, laws = _draw(logits, transforms([(1.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.0, 0, 0.5, 0.25)]), [0, 0, 7])
    assert drawn.tokens.tolist() == [-1, int(logits[1].argmax()), -1]
    assert laws[0].counts == laws[2].counts == ()
    assert laws[1].counts == (LAW_TOTAL,)


def test_the_largest_float_stands_for_infinity() -> None:
    logits = random_logits(1, 50, torch.float32)
    logits[0, 7] = torch.inf
    drawn, laws = _draw(logits, transforms([(1.0, 0, 1.0, 0.0)]), [LAW_TOTAL - 1])
    assert (drawn.tokens.tolist(), laws[0]) == ([7], SparseLaw((7,), (LAW_TOTAL,)))
