"""Draft laws on the device: integer counts over each row's likeliest tokens, and the token drawn from them.

The law is that of drafting/growth/laws on the host, up to rounding: temperatures and truncations are float32 here.
Rounding does not bias a draft: the token is drawn from the very counts that are returned. Does not wait for the device;
output shapes depend on input shapes alone.

Not here: the randomness (Draft.chain_draws), races (kernels/coupled_sample).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from outrider.kernels.sampling_support.transforms import Transforms
from outrider.kernels.sampling_support.triton import row_laws
from outrider.kernels.sampling_support.triton_tiles import key_shift
from outrider.shared.messages import LAW_SIZE, LAW_TOTAL


class LawDraws(NamedTuple):
    """Drawn tokens and their laws; "empty": a row without a finite logit."""

    tokens: torch.Tensor  # int64 [R]; -1: empty
    shares: torch.Tensor  # float32 [R]; the token's probability in its law
    law_token_ids: torch.Tensor  # int32 [R, LAW_SIZE], likeliest first
    law_counts: torch.Tensor  # int32 [R, LAW_SIZE]; a row's sum is LAW_TOTAL; 0: empty


def draw_from_laws(logits: torch.Tensor, transforms: Transforms, places: torch.Tensor) -> LawDraws:
    """Draws one token per row of logits [R, V], float32, bfloat16 or float16, from its law.

    places int64 [R], uniform in [0, LAW_TOTAL), is the randomness. Truncations are those of engine.sampling.laws: the
    border of top-k, top-p and min-p is found over the whole row, not only the LAW_SIZE likeliest tokens. NaN counts as
    -inf, +inf as the largest float. Results of rows with temperature 0 are meaningless (argmax has no law). Raises
    KernelArgumentError.
    """
    token_ids, values, kept = _likeliest(logits, transforms)
    temperatures = torch.where(transforms.temperatures > 0, transforms.temperatures, 1.0).double()
    scaled = (values.double() - values[:, :1].double()) / temperatures[:, None]
    weights = torch.where(kept, scaled.exp(), 0.0)
    has_support = kept[:, 0]
    mass = torch.where(has_support, weights.sum(-1), 1.0)
    counts = (weights / mass[:, None] * LAW_TOTAL).floor().long()
    counts[:, 0] += torch.where(has_support, LAW_TOTAL - counts.sum(-1), 0)
    rank = (counts.cumsum(-1) <= places[:, None]).sum(-1, keepdim=True).clamp(max=counts.shape[1] - 1)
    tokens = torch.where(has_support, token_ids.gather(1, rank)[:, 0], -1)
    shares = (counts.gather(1, rank)[:, 0] / LAW_TOTAL).float()
    padding = (0, LAW_SIZE - counts.shape[1])
    law_token_ids, law_counts = (torch.nn.functional.pad(part.int(), padding) for part in (token_ids, counts))
    return LawDraws(tokens, shares, law_token_ids, law_counts)


def _likeliest(logits: torch.Tensor, transforms: Transforms) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns [R, at most LAW_SIZE]: ids (int64), logits (float32), and whether the truncations keep them.

    Largest logit first, ties by the smaller id: the kernels' order, of which the kept tokens are a prefix.
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
    """Returns int64 keys in the order of float32 values, as kernels/sampling_support/triton_tiles; -0.0 equals 0.0."""
    bits = (values + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
