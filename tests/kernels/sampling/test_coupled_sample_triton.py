"""The GPU's race against its float64 reference and the engine's numpy one; row invariance; odd rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.engine.sampling import coupling
from outrider.engine.sampling.laws import LogitsProcessor
from outrider.kernels.coupled_sample import reference
from outrider.kernels.coupled_sample.triton import coupled_sample, coupled_sample_with_shares
from outrider.kernels.errors import KernelArgumentError
from outrider.kernels.sampling_support.transforms import Transforms
from outrider.shared.sampling_params import SamplingParams
from tests.kernels.sampling.sampling_cases import FIELDS, random_keys, random_logits, rows, transforms
from tests.kernels.triton_device import device

pytestmark = pytest.mark.gpu

# Of the race's two best values, what float32 may turn round: the rounding of logit / temperature and of log(E).
NEAR_TIE = 1e-5


def expect_tokens(logits: torch.Tensor, fields: Transforms, keys: torch.Tensor) -> int:
    """The reference's token in every row but for near ties; returns how many rows those are."""
    mine = coupled_sample(logits, fields, keys)
    assert mine.dtype == torch.int64
    expected = reference.coupled_sample(logits, fields, keys)
    values = reference.race_values(logits, fields, keys)
    differs = mine != expected
    gaps = (values.gather(1, mine[:, None]) - values.gather(1, expected[:, None]))[differs]
    assert (gaps < NEAR_TIE).all(), gaps
    return int(differs.sum())


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "chosen"),
    [
        (1, torch.float32, FIELDS[:2]),
        (7, torch.bfloat16, FIELDS),
        (300, torch.float32, FIELDS[:8]),
        (300, torch.bfloat16, FIELDS[:8]),
        # Three chunks of the vocabulary, the last of them short.
        (9001, torch.float32, FIELDS[:3]),
        (9001, torch.bfloat16, FIELDS[:2]),
        *((128256, dtype, FIELDS[:6] * 8) for dtype in (torch.float32, torch.bfloat16) if device().type == "cuda"),
    ],
)
def test_token_is_the_references(
    vocab_size: int, dtype: torch.dtype, chosen: list[tuple[float, int, float, float]]
) -> None:
    logits = random_logits(len(chosen), vocab_size, dtype)
    assert expect_tokens(logits, transforms(chosen), random_keys(len(chosen))) == 0


def test_near_ties_are_rare() -> None:
    num_rows = 200 if torch.device("cpu") == random_keys(1).device else 20_000
    logits, fields = random_logits(num_rows, 64, torch.float32, 1.0), transforms(FIELDS[1:2] * num_rows)
    assert expect_tokens(logits, fields, random_keys(num_rows)) <= num_rows // 1000


def test_token_is_the_engines() -> None:
    chosen = [FIELDS[0], FIELDS[1], FIELDS[5]]
    logits = random_logits(len(chosen), 120, torch.float32)
    key, index = 0xFEDCBA9876543210, 17
    words = np.array([coupling.index_key(key, index)] * len(chosen), dtype=np.uint32).view(np.int32)
    mine = coupled_sample(logits, transforms(chosen), torch.from_numpy(words).to(logits.device)).tolist()
    for row, (temperature, top_k, top_p, min_p) in enumerate(chosen):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        law = LogitsProcessor(params, (), ()).log_weights(logits[row].cpu().numpy(), ())
        assert mine[row] == coupling.coupled_sample(law, key, index)


def test_a_rows_token_does_not_depend_on_the_other_rows() -> None:
    # Flat logits: without the noise of its own row a token would change.
    logits, fields, keys = random_logits(6, 40, torch.float32, 0.1), transforms(FIELDS[:6]), random_keys(6)
    together = coupled_sample(logits, fields, keys)
    order = [5, 2, 0, 4]
    assert torch.equal(coupled_sample(logits[order], rows(fields, order), keys[order].contiguous()), together[order])
    wide = torch.full((6, 51), torch.nan, device=logits.device)
    wide[:, :40] = logits
    assert torch.equal(coupled_sample(wide[:, :40], fields, keys), together)
    assert len(set(together.tolist())) > 1


def test_greedy_ties_go_to_the_smallest_id_across_chunks() -> None:
    logits = random_logits(2, 9000, torch.bfloat16).clamp(max=4.0)
    logits[0, :5000] = -1.0
    logits[0, [5001, 8999]] = 7.0
    logits[1, [4095, 4096]] = 7.0
    assert coupled_sample(logits, transforms(FIELDS[:1] * 2), random_keys(2)).tolist() == [5001, 4095]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_rows_of_masked_logits() -> None:
    logits = torch.full((4, 30), -torch.inf)
    logits[0, 21] = -50.0
    logits[1, [4, 9]] = torch.tensor([torch.nan, -3.0])
    logits[3, 5:9] = torch.nan
    fields = transforms([FIELDS[1], FIELDS[3], FIELDS[1], FIELDS[0]])
    assert coupled_sample(logits.to(fields.temperatures.device), fields, random_keys(4)).tolist() == [21, 9, -1, -1]


def test_no_rows_and_wrong_keys() -> None:
    fields = rows(transforms(FIELDS[:1]), [])
    logits, keys = random_logits(1, 9, torch.float32), random_keys(1)
    assert coupled_sample(logits[:0], fields, keys[:0]).shape == (0,)
    with pytest.raises(KernelArgumentError, match="key_words"):
        coupled_sample(logits, transforms(FIELDS[:1]), keys.to(torch.int64))


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.parametrize(("vocab_size", "dtype"), [(7, torch.bfloat16), (300, torch.float32), (9001, torch.bfloat16)])
def test_shares_are_the_softmax_of_the_race(vocab_size: int, dtype: torch.dtype) -> None:
    chosen = FIELDS[:6]
    logits, fields, keys = random_logits(6, vocab_size, dtype), transforms(chosen), random_keys(6)
    logits[5] = -torch.inf
    tokens, shares = coupled_sample_with_shares(logits, fields, keys)
    assert torch.equal(tokens, coupled_sample(logits, fields, keys))
    # Argmax has one token in its law; what is compared there is the logits.
    races = -reference.race_values(logits, fields, keys)
    races[0] = logits[0].double()
    expected = torch.softmax(races[:5], dim=1).max(dim=1).values
    torch.testing.assert_close(shares[:5].double(), expected, rtol=1e-4, atol=0.0)
    assert (tokens[5].item(), shares[5].item()) == (-1, 0.0)
