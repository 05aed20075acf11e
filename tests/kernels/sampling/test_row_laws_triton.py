"""Borders and masses of truncated rows against the sort-based reference and the engine's own numpy path."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampling.laws import LogitsProcessor
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.sampling_support import reference
from outrider.kernels.sampling_support.transforms import Transforms
from outrider.kernels.sampling_support.triton import RowLaws, row_laws
from outrider.shared.sampling_params import SamplingParams
from tests.kernels.sampling.sampling_cases import FIELDS, random_logits, rows, transforms

pytestmark = pytest.mark.gpu


def support(logits: torch.Tensor, laws: RowLaws) -> torch.Tensor:
    """bool [R, V], from the border alone."""
    bits = reference.sanitized(logits).to(torch.float32)
    keys = (bits + 0.0).view(torch.int32)
    keys = torch.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    keys = keys >> {torch.float32: 0, torch.bfloat16: 16, torch.float16: 13}[logits.dtype]
    border = laws.border_keys[:, None]
    ids = torch.arange(logits.shape[1], device=logits.device)[None]
    return (keys > border) | ((keys == border) & (ids <= laws.border_ids[:, None]))


def expect_laws(logits: torch.Tensor, fields: Transforms, laws: RowLaws) -> None:
    expected = reference.log_weights(logits, fields)
    assert torch.equal(support(logits, laws), expected > -torch.inf)
    masses = torch.exp(expected - expected.amax(1, keepdim=True)).nan_to_num(0.0).sum(1)
    torch.testing.assert_close(laws.masses, masses, rtol=3e-6, atol=0.0)


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "spread"),
    [(200, torch.float32, 3.0), (301, torch.bfloat16, 3.0), (37, torch.float16, 0.5), (4100, torch.bfloat16, 1.0)],
)
def test_support_and_mass_are_the_references(vocab_size: int, dtype: torch.dtype, spread: float) -> None:
    chosen = FIELDS if vocab_size < 1000 else FIELDS[2:4] + FIELDS[5:6]
    logits, fields = random_logits(len(chosen), vocab_size, dtype, spread), transforms(chosen)
    expect_laws(logits, fields, row_laws(logits, fields, with_mass=True))


@pytest.mark.parametrize("scratch_len", [1, 16])
def test_support_does_not_depend_on_the_scratch(scratch_len: int) -> None:
    chosen = FIELDS[2:4] + FIELDS[5:7]
    logits, fields = random_logits(len(chosen), 90, torch.float32, 0.5), transforms(chosen)
    expect_laws(logits, fields, row_laws(logits, fields, with_mass=True, scratch_len=scratch_len))


def test_ties_at_a_border_go_to_the_smaller_id() -> None:
    chosen = [(1.0, 3, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (1.0, 6, 0.5, 0.0), (0.0, 0, 1.0, 0.0), (1.0, 2, 1.0, 0.5)]
    logits = torch.zeros(len(chosen), 8)
    logits[:, 5] = -0.0
    logits[1:, 2] = -1.0
    logits[4, 6] = 1.0
    fields = transforms(chosen)
    logits = logits.to(fields.temperatures.device)
    expect_laws(logits, fields, row_laws(logits, fields, with_mass=True))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_odd_values_have_a_defined_law() -> None:
    chosen = [(1.0, 4, 1.0, 0.0), (1.0, 0, 0.5, 0.0), (0.5, 0, 1.0, 0.0), (1.0, 5, 0.5, 0.0), (0.0, 0, 1.0, 0.0)]
    logits = torch.full((5, 20), -torch.inf)
    logits[0, [3, 9]] = torch.tensor([1.0, 2.0])
    logits[1, 4:8] = torch.tensor([torch.nan, 0.5, torch.nan, 0.25])
    logits[2, :4] = torch.tensor([torch.finfo(torch.float32).min, 3.0, torch.inf, torch.inf])
    logits[4, [1, 7]] = torch.tensor([-5.0, -5.0])
    fields = transforms(chosen)
    logits = logits.to(fields.temperatures.device)
    laws = row_laws(logits, fields, with_mass=True)
    expect_laws(logits, fields, laws)
    assert laws.masses[3] == 0.0


def test_a_rows_bits_do_not_depend_on_the_other_rows() -> None:
    chosen = FIELDS[2:7]
    logits, fields = random_logits(len(chosen), 50, torch.float32), transforms(chosen)
    together = row_laws(logits, fields, with_mass=True)
    alone = row_laws(logits[3:4].clone(), rows(fields, [3]), with_mass=True)
    assert torch.equal(alone.masses, together.masses[3:4])
    assert torch.equal(alone.border_keys, together.border_keys[3:4])
    # A slice of a wider tensor: rows do not follow each other.
    wide = torch.full((len(chosen), 67), torch.nan, device=logits.device)
    wide[:, :50] = logits
    assert torch.equal(row_laws(wide[:, :50], fields, with_mass=True).masses, together.masses)


def test_support_is_the_engines() -> None:
    chosen = [FIELDS[2], FIELDS[3], FIELDS[5]]
    logits, fields = random_logits(len(chosen), 150, torch.float32), transforms(chosen)
    mine = support(logits, row_laws(logits, fields, with_mass=True)).cpu().numpy()
    for row, (temperature, top_k, top_p, min_p) in enumerate(chosen):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        theirs = LogitsProcessor(params, (), ()).log_weights(logits[row].cpu().numpy(), ())
        assert np.array_equal(mine[row], theirs > -np.inf)


def test_wrong_arguments_are_refused() -> None:
    fields = transforms(FIELDS[:2])
    with pytest.raises(KernelArgumentError, match="temperatures"):
        row_laws(random_logits(3, 8, torch.float32), fields, with_mass=False)
    with pytest.raises(KernelArgumentError, match="contiguous"):
        row_laws(random_logits(8, 2, torch.float32).T, fields, with_mass=False)
