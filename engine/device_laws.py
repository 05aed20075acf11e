"""Draft laws on the device: integer counts over the likeliest tokens of every row, and the token that is drawn.

The same law as drafter_service/growth/laws makes of engine/sampling on the host, but for rounding: temperatures and
truncations are float32 here. A difference makes no draft unfair, since the counts that come out are the very ones that
the token is drawn from. Tensors in, tensors out: nothing waits for the device, and shapes depend on shapes alone.

Not here: where the randomness comes from (Draft.chain_draws), races (kernels/coupled_sample).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.sampling_support.transforms import Transforms
from kernels.sampling_support.triton import row_laws
from kernels.sampling_support.triton_tiles import key_shift
from shared.messages import LAW_SIZE, LAW_TOTAL


class LawDraws(NamedTuple):
    """tokens int64 [R], -1 for a row without a number; shares float32 [R], what its law gives each of them; the laws:
    token_ids, counts int32 [R, LAW_SIZE], likeliest first, counts sum to LAW_TOTAL (0 for a row without a number)."""

    tokens: torch.Tensor
    shares: torch.Tensor
    law_token_ids: torch.Tensor
    law_counts: torch.Tensor


def draw_from_laws(logits: torch.Tensor, transforms: Transforms, places: torch.Tensor) -> LawDraws:
    """logits [R, V], float32, bfloat16 or float16; places int64 [R], uniform in [0, LAW_TOTAL), the randomness.

    Truncations as in engine.sampling: the border of top-k, top-p and min-p is found over the whole row, so what of a
    support lies beyond the LAW_SIZE likeliest tokens counts there. NaN counts as -inf, +inf as the largest float.
    Argmaxes have no law: what comes out for a row of temperature 0 is of no account. Raises KernelArgumentError.
    """
    token_ids, values, kept = _likeliest(logits, transforms)
    temperatures = torch.where(transforms.temperatures > 0, transforms.temperatures, 1.0).double()
    scaled = (values.double() - values[:, :1].double()) / temperatures[:, None]
    weights = torch.where(kept, scaled.exp(), 0.0)
    alive = kept[:, 0]
    mass = torch.where(alive, weights.sum(-1), 1.0)
    counts = (weights / mass[:, None] * LAW_TOTAL).floor().long()
    counts[:, 0] += torch.where(alive, LAW_TOTAL - counts.sum(-1), 0)
    rank = (counts.cumsum(-1) <= places[:, None]).sum(-1, keepdim=True).clamp(max=counts.shape[1] - 1)
    tokens = torch.where(alive, token_ids.gather(1, rank)[:, 0], -1)
    shares = (counts.gather(1, rank)[:, 0] / LAW_TOTAL).float()
    padding = (0, LAW_SIZE - counts.shape[1])
    law_token_ids, law_counts = (torch.nn.functional.pad(part.int(), padding) for part in (token_ids, counts))
    return LawDraws(tokens, shares, law_token_ids, law_counts)


def _likeliest(logits: torch.Tensor, transforms: Transforms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """[R, at most LAW_SIZE]: ids (int64), logits (float32), and which of them the truncations keep.

    Largest logit first, ties by the smaller id: the order that the kernels' borders are meant in, so what is kept is a
    head of it.
    """
    vocab_size = logits.shape[1]
    laws = row_laws(logits, transforms, with_mass=False)
    values = torch.nan_to_num(logits.float(), nan=-torch.inf, posinf=torch.finfo(torch.float32).max, neginf=-torch.inf)
    keys = _order_keys(values)
    ids = torch.arange(vocab_size, device=logits.device)
    best = torch.topk(keys * 2**32 + (vocab_size - 1 - ids), min(LAW_SIZE, vocab_size), sorted=True).indices
    keys, values = keys.gather(1, best) >> key_shift(logits.dtype), values.gather(1, best)
    border_keys, border_ids = laws.border_keys[:, None], laws.border_ids[:, None]
    kept = (keys > border_keys) | ((keys == border_keys) & (best <= border_ids))
    return best, values, kept & (values > -torch.inf)


def _order_keys(values: torch.Tensor) -> torch.Tensor:
    """int64 in the order of float32 values: the keys of kernels/sampling_support/triton_tiles; -0.0 and 0.0 are one."""
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
