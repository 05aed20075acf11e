"""What a request used, added up over its choices: tokens, and how speculation went."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from gateway.openai_convert import Prepared
from gateway.requests import GenerationUpdate, SpeculationSummary
from gateway.response_types import Metrics, SpeculationMetrics, Usage
from gateway.service import SpecMetricsLevel
from shared.errors import InternalError


class Account:
    """Every update goes through `add`; the rest only reads."""

    def __init__(self, prepared: Prepared, level: SpecMetricsLevel) -> None:
        self._requests = prepared.requests
        self._drop_output = prepared.options.drop_output
        self._level = level
        self._num_tokens: dict[int, int] = {}
        self._num_cached = [0] * len(prepared.requests)
        self._finished: set[int] = set()
        self._speculation: list[SpeculationSummary] = []

    def choice(self, prompt_index: int, update: GenerationUpdate) -> int:
        """The index of the update's choice in the answer."""
        return prompt_index * self._requests[prompt_index].n + update.choice_index

    def add(self, prompt_index: int, update: GenerationUpdate) -> None:
        choice = self.choice(prompt_index, update)
        self._num_tokens[choice] = self._num_tokens.get(choice, 0) + len(update.token_ids)
        if update.choice_index == 0:  # later choices find the prompt that the first one computed
            self._num_cached[prompt_index] = max(self._num_cached[prompt_index], update.num_cached_tokens)
        if update.finish_reason is not None:
            self._finished.add(choice)
        if update.speculation is not None:
            self._speculation.append(update.speculation)

    def check_finished(self) -> None:
        """Raises InternalError when the generator ended before its choices did: never half an answer as a whole."""
        wanted = sum(request.n for request in self._requests)
        if len(self._finished) != wanted:
            raise InternalError(f"the output ended early: {len(self._finished)} of {wanted} choices finished")

    def usage(self) -> Usage:
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        completion_tokens = 0 if self._drop_output else sum(self._num_tokens.values())
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }

    def choice_usage(self, prompt_index: int, choice: int) -> Usage:
        """Of one choice so far, for streams that ask for it in every event."""
        prompt_tokens = len(self._requests[prompt_index].prompt_token_ids)
        completion_tokens = 0 if self._drop_output else self._num_tokens.get(choice, 0)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def metrics(self) -> Metrics | None:
        """None when they are turned off, or nothing was speculated."""
        if self._level is SpecMetricsLevel.NONE or not self._speculation:
            return None
        total = add_summaries(self._speculation)
        shown = speculation_metrics(total)
        # Steps of several choices in one list would mean nothing.
        if self._level is SpecMetricsLevel.DETAILED and len(self._speculation) == 1:
            shown["per_step_accepted"] = list(total.per_step_accepted)
            shown["per_step_drafted"] = list(total.per_step_drafted)
        return {"speculative_decoding": shown}


def add_summaries(summaries: Sequence[SpeculationSummary]) -> SpeculationSummary:
    """Counts are added, num_spec_tokens is the largest."""
    histograms = [summary.acceptance_histogram for summary in summaries]
    return SpeculationSummary(
        num_spec_tokens=max(summary.num_spec_tokens for summary in summaries),
        num_spec_steps=sum(summary.num_spec_steps for summary in summaries),
        num_draft_tokens=sum(summary.num_draft_tokens for summary in summaries),
        num_accepted_draft_tokens=sum(summary.num_accepted_draft_tokens for summary in summaries),
        acceptance_histogram=tuple(sum(column) for column in zip_longest(*histograms, fillvalue=0)),
        per_step_accepted=tuple(step for summary in summaries for step in summary.per_step_accepted),
        per_step_drafted=tuple(step for summary in summaries for step in summary.per_step_drafted),
    )


def speculation_metrics(summary: SpeculationSummary) -> SpeculationMetrics:
    """Under vLLM's names."""
    return {
        "mean_acceptance_length": summary.mean_acceptance_length,
        "draft_acceptance_rate": summary.draft_acceptance_rate,
        "acceptance_histogram": list(summary.acceptance_histogram),
        "num_spec_steps": summary.num_spec_steps,
        "num_accepted_draft_tokens": summary.num_accepted_draft_tokens,
        "num_draft_tokens": summary.num_draft_tokens,
        "num_spec_tokens": summary.num_spec_tokens,
    }
