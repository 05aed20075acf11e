"""Turns a row of logits into the law that its token is drawn from, with all of a request's sampling parameters.

Order: logit bias, penalties, the permitted tokens, then temperature, top-k, top-p, min-p.
Each step depends only on the tokens before the row, so a draft path gets the same laws as plain decoding. All
arithmetic is float64 over one row.

Not here: which tokens are permitted (`permitted`), noise (`coupling`) and acceptance (verifier_service/acceptance).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.grammar import GrammarState
from outrider.engine.sampling.penalties import Penalties
from outrider.engine.sampling.permitted import PermittedTokens
from outrider.engine.sampling.ranking import LOG_FLOORS, largest_first, likeliest
from outrider.shared.errors import NoTokenPermitted
from outrider.shared.messages import TokenLogprob
from outrider.shared.sampling_params import SamplingParams

Row = NDArray[np.float32]
LogWeights = NDArray[np.float64]

_MASS_MARGIN = 1.0 + 1e-9  # ratio; exceeds what the order of a sum can change


class LogitsProcessor:
    """The transforms of one request. They are prepared once, here: a row only costs the work of its own tokens.

    `prompt_token_ids`: for the repetition penalty. `eos_token_ids`: the model's, whatever `ignore_eos` says.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        grammar: GrammarState | None = None,
    ) -> None:
        self._params = params
        self.grammar = grammar
        self.permitted = PermittedTokens(params, eos_token_ids, grammar)
        self._biased_ids = np.asarray([token_id for token_id, _ in params.logit_bias], dtype=np.int64)
        self._biases = np.asarray([bias for _, bias in params.logit_bias], dtype=np.float64)
        self._penalties = Penalties(params, prompt_token_ids)
        self._edits_logits = bool(params.logit_bias or self._penalties or not self.permitted.are_all)

    @property
    def is_plain_argmax(self) -> bool:
        """Returns whether the law is the argmax of the row, independent of earlier tokens."""
        return self._params.greedy and not self._edits_logits

    @property
    def is_plain(self) -> bool:
        """Returns whether the law is just temperature and truncation, independent of earlier tokens."""
        return not self._edits_logits

    def log_weights(self, logits: Row, output_token_ids: Sequence[int]) -> LogWeights:
        """Returns float64 [V]: unnormalised log-probabilities, -inf outside the support.

        `logits`: float32 [V]; `output_token_ids`: all output tokens before this row, draft path included.
        Raises as `permitted.mask` does.
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
        """Returns float64 [V]: the row after all steps that depend on earlier tokens; no temperature, no truncation.

        Raises as `permitted.mask` does.
        """
        row = logits.astype(np.float64)
        if self._edits_logits:
            self._edit(row, output_token_ids)
        return row

    def _edit(self, row: LogWeights, output_token_ids: Sequence[int]) -> None:
        if len(self._biased_ids):  # at most one entry per token id: O(V), as the row's other steps
            np.add.at(row, self._biased_ids, self._biases)
        if self._penalties:
            self._penalties.apply(row, output_token_ids)
        if not self.permitted.are_all:
            row[~self.permitted.mask(output_token_ids, len(row))] = -np.inf
            if (row == -np.inf).all():  # a draft model that lacks the target's permitted tokens
                raise NoTokenPermitted("no permitted token has a logit")


def _truncate(row: LogWeights, params: SamplingParams) -> LogWeights:
    """Applies top-k, then top-p over the rest, then min-p; max(row) is 0. Ties at a border go to the smaller id."""
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
    """Returns the likeliest tokens that hold `top_p` of the mass, likeliest first; max(row) is 0."""
    total = float(np.exp(row).sum())
    for floor in LOG_FLOORS:
        candidates = np.flatnonzero(row > floor)
        weights = np.exp(row[candidates])
        if weights.sum() > top_p * total * _MASS_MARGIN:
            break
    order = np.argsort(-row[candidates], kind="stable")
    return candidates[order[: _nucleus_len(weights[order], total, top_p)]]


def _nucleus_len(weights: LogWeights, total: float, top_p: float) -> int:
    """Returns the number of descending weights with less than `top_p` of the total before them."""
    mass_before = np.cumsum(weights) - weights
    return max(1, int(np.count_nonzero(mass_before < top_p * total)))


def probabilities(log_weights: LogWeights) -> NDArray[np.float64]:
    """Returns float64 [V], which sums to 1."""
    support = (log_weights > -np.inf).nonzero()[0]
    if 2 * len(support) > len(log_weights):
        weights: NDArray[np.float64] = np.exp(log_weights - log_weights.max())
    else:  # exp is slow for -inf: 0.7 ms for 151,936
        weights = np.zeros(len(log_weights))
        weights[support] = np.exp(log_weights[support] - log_weights.max())
    weights /= weights.sum()
    return weights


def draw(probs: NDArray[np.float64], rng: np.random.Generator) -> int:
    """Draws one token id from a law that need not be normalised; never one without mass."""
    support = (probs > 0.0).nonzero()[0]
    cumulative = probs[support].cumsum()
    index = np.searchsorted(cumulative, rng.random() * cumulative[-1], side="right")
    return int(support[min(int(index), len(support) - 1)])


def token_logprob(logits: Row, token_id: int, num_top: int, others: Sequence[int] = ()) -> TokenLogprob:
    """Returns a token's log-probability before any transform (vLLM's `raw_logprobs`), and others'.

    These are the `others`, or else the num_top likeliest. others: token ids, in the order in which they come back; ()
    asks for the likeliest.
    """
    row = logits.astype(np.float64)
    row -= row.max()
    row -= np.log(np.exp(row).sum())
    rank = 1 + int(np.count_nonzero(row > row[token_id]))
    if not num_top and not others:
        return TokenLogprob(float(row[token_id]), rank)
    top = list(others) if others else largest_first(row, num_top).tolist()
    return TokenLogprob(float(row[token_id]), rank, tuple(top), tuple(float(row[token]) for token in top))
