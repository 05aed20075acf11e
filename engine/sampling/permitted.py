"""The tokens that may come next in one request's output, whatever their logits.

The grammar decides where an output *may end*; the request (`stop_token_ids`, `ignore_eos`) decides at which tokens it
*stops*. In order:

1. allowed_token_ids, bad_words and the grammar exclude tokens.
2. Where the thinking budget is used up, only the end of thinking is left, if rule 1 permits it.
3. Stop tokens are excluded until min_tokens, and under a grammar with ignore_eos end-of-sequence tokens throughout,
   unless nothing else is left.
4. Where nothing is left and the grammar may end, the end-of-sequence tokens are permitted: the output stops there.
5. Where still nothing is left is a dead end. The output ends before it, with FinishReason.ABORT.

All rules depend on the tokens before the row alone, so drafts change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from outrider.engine.sampling.bad_words import bad_words_trie
from outrider.engine.sampling.grammar import GrammarState
from outrider.engine.sampling.thinking import ThinkingCount
from outrider.shared.errors import InvalidRequest, NoTokenPermitted
from outrider.shared.sampling_params import SamplingParams

Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


class PermittedTokens:
    """The rules of one request. stop_ids: tokens at which the output stops."""

    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int], grammar: GrammarState | None) -> None:
        self._min_tokens = params.min_tokens
        self._grammar = grammar
        self._allowed_ids = np.asarray(params.allowed_token_ids, dtype=np.int64)
        self._bad_words = bad_words_trie(params.bad_words)
        self._budget = params.thinking_budget
        self._thinking = ThinkingCount(self._budget) if self._budget is not None else None
        # Nothing can follow the end of a grammar, so the output stops there with ignore_eos too.
        ends = frozenset(eos_token_ids) if grammar is not None or not params.ignore_eos else frozenset()
        self.stop_ids: frozenset[int] = ends | frozenset(params.stop_token_ids)
        self._stop_ids, self._eos_ids = _ids(self.stop_ids), _ids(ends)
        self._ignored_ids = _ids(ends - frozenset(params.stop_token_ids) if params.ignore_eos else ())

    @property
    def are_all(self) -> bool:
        """Returns whether every token may come anywhere."""
        return not (self.can_run_out or len(self._allowed_ids) or self._min_tokens or self._budget is not None)

    @property
    def can_run_out(self) -> bool:
        """Returns whether there may be dead ends.

        allowed_token_ids alone always leave themselves; a thinking budget yields.
        """
        return bool(self._grammar is not None or self._bad_words)

    def mask(self, output_token_ids: Sequence[int], vocab_size: int) -> Mask:
        """Returns bool [V]: the tokens that may follow this output.

        Raises NoTokenPermitted at a dead end, InvalidRequest where the grammar's limits are exceeded.
        """
        mask = np.ones(vocab_size, dtype=np.bool_)
        if len(self._allowed_ids):
            mask[:] = False
            mask[self._allowed_ids] = True
        for token_ids in self._bad_words.completing(output_token_ids):
            mask[token_ids] = False
        by_grammar = self._grammar.allowed(output_token_ids) if self._grammar is not None else None
        if by_grammar is not None:
            mask &= by_grammar
        self._end_thinking(mask, output_token_ids)
        mask = _without(mask, self._stop_ids if len(output_token_ids) < self._min_tokens else self._ignored_ids)
        if by_grammar is not None and not mask.any():
            mask[self._eos_ids] = by_grammar[self._eos_ids]
        if not mask.any():
            raise NoTokenPermitted(f"{', '.join(self._fields())} leave no token", param=self._fields()[0])
        return mask

    def _end_thinking(self, mask: Mask, output_token_ids: Sequence[int]) -> None:
        """Leaves only the end of thinking in the mask once the budget is used up, if the mask permits it.

        A grammar forbids the end in the middle of a character, whose last bytes then come first.
        """
        if self._budget is None or self._thinking is None or not self._thinking.is_used_up(output_token_ids):
            return
        if mask[self._budget.end_token_id]:
            mask[:] = False
            mask[self._budget.end_token_id] = True

    def is_dead_end(self, output_token_ids: Sequence[int], vocab_size: int) -> bool:
        """Returns whether no token may follow this output, or the grammar's limits are exceeded there."""
        try:
            self.mask(output_token_ids, vocab_size)
        except InvalidRequest:
            return True
        return False

    def _fields(self) -> list[str]:
        excluding = {
            "grammar": self._grammar is not None,
            "allowed_token_ids": len(self._allowed_ids) > 0,
            "bad_words": bool(self._bad_words),
        }
        return [name for name, excludes in excluding.items() if excludes]


def _ids(token_ids: Sequence[int] | frozenset[int]) -> Ids:
    return np.asarray(sorted(token_ids), dtype=np.int64)


def _without(mask: Mask, held_back_ids: Ids) -> Mask:
    """Returns the mask without these tokens, unless nothing is left then."""
    if not len(held_back_ids):
        return mask
    rest = mask.copy()
    rest[held_back_ids] = False
    return rest if rest.any() else mask
