"""Presence, frequency and repetition penalties of one request, counted along its output."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.sampling_params import SamplingParams


class Penalties:
    """Applies one request's penalties.

    Repetition counts prompt and output (CTRL, Keskar et al. 2019); presence and frequency, the output. The counts move
    from one row's output to the next one's, by the tokens that differ.
    """

    def __init__(self, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._params = params
        self._prompt_ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._counted: list[int] = []
        self._counts = np.zeros(0, dtype=np.int32)
        self._in_prompt = np.zeros(0, dtype=np.bool_)

    def __bool__(self) -> bool:
        params = self._params
        return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0

    def apply(self, row: NDArray[np.float64], output_token_ids: Sequence[int]) -> None:
        """Applies the penalties to `row`, float64 [V], in place."""
        params = self._params
        self._count(output_token_ids, len(row))
        output_ids = np.flatnonzero(self._counts)
        if params.repetition_penalty != 1.0:
            seen = np.flatnonzero(self._in_prompt | (self._counts > 0))
            values = row[seen]
            row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        row[output_ids] -= params.presence_penalty + params.frequency_penalty * self._counts[output_ids]

    def _count(self, output_token_ids: Sequence[int], vocab_size: int) -> None:
        if not len(self._counts):
            self._counts = np.zeros(vocab_size, dtype=np.int32)
            self._in_prompt = np.zeros(vocab_size, dtype=np.bool_)
            self._in_prompt[self._prompt_ids] = True
        shared_len = common_prefix_len(self._counted, output_token_ids)
        for token_id in self._counted[shared_len:]:
            self._counts[token_id] -= 1
        for token_id in output_token_ids[shared_len:]:
            self._counts[token_id] += 1
        self._counted[shared_len:] = output_token_ids[shared_len:]
