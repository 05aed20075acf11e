"""What a drafter says about one place of a proposal: the tokens it would try there, or the law it draws them from.

One rule per mode, so that every proposal is fair to the acceptance rule that will judge it:

    greedy      the largest logits; the target takes its own largest
    exact       the winners of the shared race (engine/coupling); the target's winner is among the first few
    rejection   samples without replacement from a sparse law, which travels along (Jeon et al. 2024)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from drafter_service.growth.laws import sparse_law
from engine.coupling import contenders_of, coupled_sample
from engine.ranking import largest_first
from engine.sampling import LogitsProcessor, LogWeights, Row
from shared.messages import SessionSpec, SparseLaw
from shared.sampling_params import SpeculationMode


@dataclass(frozen=True)
class Guess:
    """A token, and how sure the drafter is of it: a softmax over what is compared, as in EAGLE-2; NaN: not told."""

    token_id: int
    confidence: float


def samples(spec: SessionSpec) -> bool:
    """Whether draft tokens of this session must be drawn from a law, instead of ranked."""
    return spec.mode is SpeculationMode.REJECTION and not spec.sampling_params.greedy


def ranked_guesses(
    spec: SessionSpec, processor: LogitsProcessor, logits: Row, output_token_ids: Sequence[int], count: int
) -> list[Guess]:
    """The best `count` tokens to follow `output_token_ids` (draft path included), best first; logits float32 [V].

    Raises InvalidRequest when no token is allowed here.
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
    """The law to draw from after `output_token_ids`. Raises InvalidRequest when no token is allowed here."""
    return sparse_law(processor.log_weights(logits, output_token_ids))


def _winner(log_weights: LogWeights, key: int, output_index: int) -> list[Guess]:
    """Of a chain nobody asks how sure each token is, and it takes longer to say than the race."""
    if not log_weights.max() > -np.inf:
        return []
    return [Guess(coupled_sample(log_weights, key, output_index), math.nan)]


def _largest(scores: NDArray[np.floating], count: int) -> list[Guess]:
    """Ties go to the smaller id, as everywhere; a row that holds no number has no largest."""
    best = scores.max(initial=-np.inf)
    if not np.isfinite(best):
        return []
    weights = np.exp(scores - best)
    total = float(weights.sum())
    order = largest_first(scores, count) if count > 1 else [np.argmax(scores)]
    return [Guess(int(token), float(weights[token]) / total) for token in order if np.isfinite(scores[token])]
