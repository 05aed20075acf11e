"""Scores of cached keys for the choice of a sparse attention, in fp64 and plain torch, on any device: the oracle."""

from __future__ import annotations

from typing import Protocol

import torch


class IndexScores(Protocol):
    """A kernel that scores keys (DeepSeek-V3.2, arXiv:2512.02556, section 2.1)."""

    def __call__(
        self, query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """query fp32 [T, H, D], weights fp32 [T, H], keys [num_slots, D], slots int32 [T, L] -> scores fp32 [T, L].

        score[t, l] = sum over h of weights[t, h] * max(query[t, h] . keys[slots[t, l]], 0); -inf where the slot is -1.
        """


def index_scores(query: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """See IndexScores."""
    scores = query.new_full(slots.shape, -torch.inf)
    for row, (heads, factors, listed) in enumerate(zip(query.double(), weights.double(), slots.long(), strict=True)):
        is_key = listed >= 0
        products = keys[listed[is_key]].double() @ heads.T
        scores[row, is_key] = (products.relu() @ factors).float()
    return scores
