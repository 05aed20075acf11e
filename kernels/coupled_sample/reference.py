"""coupled_sample in plain float64 torch with a sort: the oracle of the kernel, not for serving."""

from __future__ import annotations

import torch

from outrider.kernels.coupled_sample.noise import exponentials
from outrider.kernels.sampling_support.reference import log_weights
from outrider.kernels.sampling_support.transforms import Transforms


def race_values(logits: torch.Tensor, transforms: Transforms, key_words: torch.Tensor) -> torch.Tensor:
    """float64 [R, V]: each token's log arrival time; the smallest wins, +inf is outside the support."""
    token_ids = torch.arange(logits.shape[1], device=logits.device)
    return torch.log(exponentials(token_ids, key_words)) - log_weights(logits, transforms)


def coupled_sample(logits: torch.Tensor, transforms: Transforms, key_words: torch.Tensor) -> torch.Tensor:
    """int64 [R]: see kernels/coupled_sample/triton.py."""
    values = race_values(logits, transforms, key_words)
    tokens = torch.argmin(values, dim=1)
    return torch.where(torch.isinf(values.gather(1, tokens[:, None])[:, 0]), -1, tokens)
