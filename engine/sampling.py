"""From a row of logits to the law a token is drawn from, under all of a request's sampling fields.

Order: allowed ids, logit bias, penalties, bad words, minimum length, grammar, then temperature, top-k, top-p, min-p.
Every step looks at the tokens that stand before the row, so a draft path gets at each of its positions exactly what
plain decoding would get there.

Not here: noise (`coupling`) and acceptance (verifier_service/acceptance). All arithmetic is float64 over one row, so
the result does not depend on how many rows are processed together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.grammar import GrammarState
from engine.ranking import LOG_FLOORS, largest_first, likeliest
from shared.errors import InvalidRequest
from shared.messages import TokenLogprob
from shared.sampling_params import SamplingParams

Row = NDArray[np.float32]
LogWeights = NDArray[np.float64]

# Beyond what the order of summing can change.
_ENOUGH = 1.0 + 1e-9


class LogitsProcessor:
    """The transforms of one request.

    `prompt_token_ids` and the output tokens given with each row are what penalties and bad words look at.
    `stop_ids` are the ids that `min_tokens` holds back, and the way out when nothing else is allowed.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        stop_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self._params = params
        self.grammar = grammar
        self._prompt_ids = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        self._stop_ids = np.asarray(sorted(set(stop_ids)), dtype=np.int64)
        self._has_penalties = (
            params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0
        )
        self._edits_logits = bool(
            params.allowed_token_ids
            or params.logit_bias
            or params.bad_words
            or params.min_tokens
            or self._has_penalties
            or grammar is not None
        )

    @property
    def is_plain_argmax(self) -> bool:
        """Whether the law is all mass on the row's largest logit, whatever came before."""
        return self._params.greedy and not self._edits_logits

    @property
    def is_plain(self) -> bool:
        """Whether the law is temperature and truncation of the row's logits, whatever came before."""
        return not self._edits_logits

    def log_weights(self, logits: Row, output_token_ids: Sequence[int]) -> LogWeights:
        """float64 [V]: unnormalized log-probabilities, -inf outside the support.

        `logits` is float32 [V]; `output_token_ids` are all output tokens before this row, draft path included.
        """
        row = self.edited_logits(logits, output_token_ids)
        if self._params.greedy:
            best = int(np.argmax(row))
            row = np.full_like(row, -np.inf)
            row[best] = 0.0
            return row
        row /= self._params.temperature
        row -= row.max()
        return _truncate(row, self._params)

    def edited_logits(self, logits: Row, output_token_ids: Sequence[int]) -> LogWeights:
        """float64 [V]: after everything that looks at the tokens before; no temperature, no truncation."""
        row = logits.astype(np.float64)
        if self._edits_logits:
            self._edit(row, output_token_ids)
        return row

    def _edit(self, row: LogWeights, output_token_ids: Sequence[int]) -> None:
        params = self._params
        if params.allowed_token_ids:
            allowed = np.asarray(params.allowed_token_ids, dtype=np.int64)
            kept = row[allowed]
            row[:] = -np.inf
            row[allowed] = kept
        for token_id, bias in params.logit_bias:
            row[token_id] += bias
        if self._has_penalties:
            self._penalize(row, output_token_ids)
        for word in params.bad_words:
            prefix, last = word[:-1], word[-1]
            if not prefix or tuple(output_token_ids[-len(prefix) :]) == prefix:
                row[last] = -np.inf
        if self.grammar is not None:
            row[~self.grammar.allowed(output_token_ids)] = -np.inf
        if len(output_token_ids) < params.min_tokens and np.isfinite(np.delete(row, self._stop_ids)).any():
            row[self._stop_ids] = -np.inf
        if not np.isfinite(row).any():
            if not len(self._stop_ids):
                raise InvalidRequest("no token is allowed here, and nothing may end the output")
            row[self._stop_ids] = 0.0

    def _penalize(self, row: LogWeights, output_token_ids: Sequence[int]) -> None:
        """Repetition looks at prompt and output (CTRL, Keskar et al. 2019), presence and frequency at the output."""
        params = self._params
        counts = Counter(output_token_ids)
        output_ids = np.fromiter(counts.keys(), dtype=np.int64, count=len(counts))
        if params.repetition_penalty != 1.0:
            seen = np.union1d(self._prompt_ids, output_ids)
            values = row[seen]
            row[seen] = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
        output_counts = np.fromiter(counts.values(), dtype=np.float64, count=len(counts))
        row[output_ids] -= params.presence_penalty + params.frequency_penalty * output_counts


def _truncate(row: LogWeights, params: SamplingParams) -> LogWeights:
    """top-k, then top-p over what is left, then min-p; `row` is 0 at most. Ties at a border go to the smaller id."""
    if not (params.top_k or params.top_p < 1.0 or params.min_p > 0.0):
        return row
    if params.top_k:
        kept = likeliest(row, params.top_k)
        if params.top_p < 1.0:
            weights = np.exp(row[kept])
            kept = kept[: _nucleus_len(weights, float(weights.sum()), params.top_p)]
    elif params.top_p < 1.0:
        kept = _nucleus(row, params.top_p)
    else:
        kept = np.arange(len(row))
    if params.min_p > 0.0:
        kept = kept[np.exp(row[kept]) >= params.min_p]
    truncated = np.full_like(row, -np.inf)
    truncated[kept] = row[kept]
    return truncated


def _nucleus(row: LogWeights, top_p: float) -> NDArray[np.int64]:
    """The likeliest tokens that hold `top_p` of the mass, likeliest first; the largest of `row` is 0."""
    total = float(np.exp(row).sum())
    for floor in LOG_FLOORS:
        candidates = np.flatnonzero(row > floor)
        weights = np.exp(row[candidates])
        if weights.sum() > top_p * total * _ENOUGH:
            break
    order = np.argsort(-row[candidates], kind="stable")
    return candidates[order[: _nucleus_len(weights[order], total, top_p)]]


def _nucleus_len(weights: LogWeights, total: float, top_p: float) -> int:
    """Of weights in falling order: how many have less than `top_p` of the total before them."""
    mass_before = np.cumsum(weights) - weights
    return max(1, int(np.count_nonzero(mass_before < top_p * total)))


def probabilities(log_weights: LogWeights) -> NDArray[np.float64]:
    """float64 [V], sums to 1."""
    support = np.flatnonzero(log_weights > -np.inf)
    if 2 * len(support) > len(log_weights):
        weights: NDArray[np.float64] = np.exp(log_weights - log_weights.max())
    else:  # exp takes longer for -inf than for numbers: 0.7 ms for 151,936 of them
        weights = np.zeros(len(log_weights))
        weights[support] = np.exp(log_weights[support] - log_weights.max())
    weights /= weights.sum()
    return weights


def draw(probs: NDArray[np.float64], rng: np.random.Generator) -> int:
    """One token id from a law that need not be normalized; never one without mass."""
    support = np.flatnonzero(probs > 0.0)
    cumulative = np.cumsum(probs[support])
    place = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return int(support[min(int(place), len(support) - 1)])


def token_logprob(logits: Row, token_id: int, num_top: int) -> TokenLogprob:
    """Log-probability under the model itself, before any transform (vLLM's `raw_logprobs`)."""
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    rank = 1 + int(np.count_nonzero(row > row[token_id]))
    if not num_top:
        return TokenLogprob(float(row[token_id]), rank)
    top = largest_first(row, num_top).tolist()
    return TokenLogprob(float(row[token_id]), rank, tuple(top), tuple(float(row[token]) for token in top))
