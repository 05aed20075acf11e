"""Applies a thinking budget: a function of the output's tokens alone, at every token of a draft path."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.sampling_params import ThinkingBudget


class ThinkingCount:
    """Counts one session's thinking tokens along paths. Not for use from two threads at a time."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._max_tokens = budget.max_tokens
        self._begin = list(budget.begin_token_ids)
        self._end_ids = {budget.end_token_id, *budget.call_token_ids}
        self._output: list[int] = []
        # Per prefix of the output: the number of thinking tokens, and whether it is still thinking.
        self._states = [(0, budget.starts_open)]

    def is_used_up(self, output_token_ids: Sequence[int]) -> bool:
        """Returns whether the output is thinking and its budget is used up.

        The cost is that of the path's new tokens.
        """
        shared = common_prefix_len(self._output, output_token_ids)
        del self._output[shared:], self._states[shared + 1 :]
        for token_id in output_token_ids[shared:]:
            self._output.append(token_id)
            self._states.append(self._state_after(token_id))
        num_tokens, is_thinking = self._states[-1]
        return is_thinking and num_tokens >= self._max_tokens

    def _state_after(self, token_id: int) -> tuple[int, bool]:
        num_tokens, is_thinking = self._states[-1]
        if is_thinking:
            return (num_tokens, False) if token_id in self._end_ids else (num_tokens + 1, True)
        return num_tokens, bool(self._begin) and self._output[-len(self._begin) :] == self._begin
