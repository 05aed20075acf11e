"""A drafter's choice at one node of a proposal: the tokens to try next, or the distribution to sample them from.

One rule per mode, each fair to its acceptance rule:

    greedy      the largest logits; the target takes its own largest
    exact       the winners of the shared race (engine/coupling); the target's winner is among the first few
    rejection   samples without replacement from a sparse distribution, which is sent along (Jeon et al. 2024)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.drafting.growth.laws import sparse_law
from outrider.engine.sampling.coupling import contenders_of, coupled_sample
from outrider.engine.sampling.laws import LogitsProcessor, LogWeights, Row
from outrider.engine.sampling.ranking import largest_first
from outrider.shared.messages import SessionSpec, SparseLaw
from outrider.shared.sampling_params import SpeculationMode


@dataclass(frozen=True)
class Guess:
    """A token and its confidence: a softmax over the compared scores, as in EAGLE-2; NaN: not computed."""

    token_id: int
    confidence: float


def samples(spec: SessionSpec) -> bool:
    """Returns whether this session's draft tokens are sampled from a distribution, not ranked."""
    return spec.mode is SpeculationMode.REJECTION and not spec.sampling_params.greedy


def ranked_guesses(
    spec: SessionSpec, processor: LogitsProcessor, logits: Row, output_token_ids: Sequence[int], count: int
) -> list[Guess]:
    """Returns the best `count` tokens to follow `output_token_ids` (draft path included), best first.

    logits: float32 [V]. Raises InvalidRequest where the output ends.
    """
    if processor.is_plain_argmax:
        return _largest(logits, count)
    if spec.sampling_params.greedy:
        return _largest(processor.edited_logits(logits, output_token_ids), count)
    log_weights = processor.log_weights(logits, output_token_ids)
    if count == 1:
        return _winner(log_weights, spec.stream_key, len(output_token_ids))
    token_ids, arrivals = contenders_of(log_weights, spec.stream_key, len(output_token_ids), count)
    return [Guess(int(token_ids[guess.token_id]), guess.confidence) for guess in _largest(-arrivals, count)]


def draft_law(processor: LogitsProcessor, logits: Row, output_token_ids: Sequence[int]) -> SparseLaw:
    """Returns the distribution after `output_token_ids`. Raises InvalidRequest where the output ends."""
    return sparse_law(processor.log_weights(logits, output_token_ids))


def _winner(log_weights: LogWeights, key: int, output_index: int) -> list[Guess]:
    """Returns the race's winner without confidence: a chain does not use it, and it takes longer than the race."""
    if not log_weights.max() > -np.inf:
        return []
    return [Guess(coupled_sample(log_weights, key, output_index), math.nan)]


def _largest(scores: NDArray[np.floating], count: int) -> list[Guess]:
    """Returns the largest scores' tokens. Ties go to the smaller id, as everywhere; a row of NaNs has no largest."""
    best = scores.max(initial=-np.inf)
    if not np.isfinite(best):
        return []
    weights = np.exp(scores - best)
    total = float(weights.sum())
    order = largest_first(scores, count) if count > 1 else [np.argmax(scores)]
    return [Guess(int(token), float(weights[token]) / total) for token in order if np.isfinite(scores[token])]
