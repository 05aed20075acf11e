"""Sampling on the device that holds the logits, with the triton kernels: logits in, token ids out.

Not here: whose rows they are and the randomness (verifier_service), the arithmetic (kernels/coupled_sample,
kernels/rejection_sample) and its float64 counterpart on the host (laws, coupling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.engine.uploads import upload
from outrider.kernels.coupled_sample.triton import coupled_sample
from outrider.kernels.rejection_sample.drafts import ChainDrafts
from outrider.kernels.rejection_sample.triton import rejection_sample
from outrider.kernels.sampling_support.transforms import Transforms
from outrider.shared.messages import LAW_TOTAL, SparseLaw
from outrider.shared.sampling_params import SamplingParams


class RowFields:
    """The sampling parameters of rows; a row is argmax until set."""

    def __init__(self, num_rows: int) -> None:
        self._temperatures = np.zeros(num_rows, dtype=np.float32)
        self._top_ks = np.zeros(num_rows, dtype=np.int32)
        self._top_ps = np.ones(num_rows, dtype=np.float32)
        self._min_ps = np.zeros(num_rows, dtype=np.float32)

    def set(self, rows: slice, params: SamplingParams) -> None:
        self._temperatures[rows] = 0.0 if params.greedy else params.temperature
        self._top_ks[rows] = params.top_k
        self._top_ps[rows] = params.top_p
        self._min_ps[rows] = params.min_p

    def to(self, device: torch.device) -> Transforms:
        fields = (self._temperatures, self._top_ks, self._top_ps, self._min_ps)
        return Transforms(*(upload(field, device) for field in fields))


def draw_rows(logits: torch.Tensor, fields: RowFields, key_words: NDArray[np.uint32]) -> NDArray[np.int64]:
    """Returns int64 [R]: the winner of each row's race with its key (uint32 [R, 2]); -1: no finite logit."""
    keys = upload(key_words.view(np.int32), logits.device)
    drawn: NDArray[np.int64] = coupled_sample(logits, fields.to(logits.device), keys).cpu().numpy()
    return drawn


@dataclass(frozen=True)
class ChainDraft:
    """One session's chain with laws, and its randomness."""

    params: SamplingParams
    token_ids: Sequence[int]
    laws: Sequence[SparseLaw]
    by_block: bool  # block verification, else token by token
    uniforms: NDArray[np.float64]  # [1 + tokens]
    key_words: NDArray[np.uint32]  # [2]: 64 random bits


def accept_chains(logits: torch.Tensor, chains: Sequence[ChainDraft]) -> list[tuple[int, int]]:
    """Returns, per chain, the number of accepted tokens and the token after them (-1: its row has no finite logit).

    logits [N, V]: the chains' rows in order, 1 + tokens each.
    """
    row_starts = np.cumsum([0, *(1 + len(chain.token_ids) for chain in chains)])
    num_rows, width = int(row_starts[-1]), max(len(law.token_ids) for chain in chains for law in chain.laws)
    fields = RowFields(num_rows)
    token_ids = np.zeros(num_rows, dtype=np.int64)
    law_token_ids, law_counts = (np.zeros((num_rows, width), dtype=np.int32) for _ in range(2))
    for chain, first, last in zip(chains, row_starts[:-1].tolist(), row_starts[1:].tolist(), strict=True):
        fields.set(slice(first, last), chain.params)
        token_ids[first + 1 : last] = chain.token_ids
        for row, law in enumerate(chain.laws, start=first + 1):
            law_token_ids[row, : len(law.token_ids)] = law.token_ids
            law_counts[row, : len(law.counts)] = law.counts
    device = logits.device
    drafts = ChainDrafts(
        row_starts=upload(row_starts.astype(np.int32), device),
        token_ids=upload(token_ids, device),
        law_token_ids=upload(law_token_ids, device),
        law_counts=upload(law_counts, device),
        law_total=LAW_TOTAL,
        block_rules=upload(np.array([chain.by_block for chain in chains], dtype=np.int32), device),
    )
    uniforms = upload(np.concatenate([chain.uniforms for chain in chains]), device)
    keys = upload(np.stack([chain.key_words for chain in chains]).view(np.int32), device)
    nums, finals = rejection_sample(logits, fields.to(device), drafts, uniforms, keys)
    return list(zip(nums.tolist(), finals.tolist(), strict=True))
