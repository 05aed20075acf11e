"""A row's law after temperature, top-k, top-p and min-p, in plain float64 with a sort: the oracle, not for serving.

engine/sampling/laws.py (`_truncate`) with per-row parameters. NaN counts as -inf, +inf as the largest float.
"""

from __future__ import annotations

import torch

from outrider.kernels.sampling_support.transforms import Transforms


def log_weights(logits: torch.Tensor, transforms: Transforms) -> torch.Tensor:
    """float64 [R, V], unnormalised, -inf outside the support. `logits`: [R, V] of any float dtype."""
    values = sanitized(logits)
    per_row = zip(*(field.tolist() for field in transforms), strict=True)
    return torch.stack([_row(row, *numbers) for row, numbers in zip(values, per_row, strict=True)])


def sanitized(logits: torch.Tensor) -> torch.Tensor:
    """float64: NaN becomes -inf, values are at most the largest float32."""
    largest = torch.finfo(torch.float32).max
    return torch.nan_to_num(logits.to(torch.float64), nan=-torch.inf, posinf=largest, neginf=-torch.inf)


def _row(row: torch.Tensor, temperature: float, top_k: float, top_p: float, min_p: float) -> torch.Tensor:
    truncated = torch.full_like(row, -torch.inf)
    if not torch.isfinite(row).any():
        return truncated
    # Ordered before the division: the float32 order decides, as in the kernel.
    order = torch.sort(row, descending=True, stable=True).indices
    if temperature == 0.0:
        truncated[order[0]] = 0.0
        return truncated
    scaled = (row - row[order[0]]) / temperature
    order = order[: int(torch.isfinite(row).sum())]
    if top_k:
        order = order[: int(top_k)]
    weights = torch.exp(scaled[order])
    if top_p < 1.0:
        mass_before = torch.cumsum(weights, 0) - weights
        count = max(1, int((mass_before < top_p * weights.sum()).sum()))
        order, weights = order[:count], weights[:count]
    if min_p > 0.0:
        order = order[weights >= min_p]
    truncated[order] = scaled[order]
    return truncated
