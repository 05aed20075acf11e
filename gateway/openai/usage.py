"""A request's account, summed over its choices: tokens, speculation figures and the receipt."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from outrider.gateway.openai.answer_types import (
    CompletionTokensDetails,
    Metrics,
    ReceiptBody,
    SpeculationMetrics,
    Usage,
)
from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.openai.receipt_signature import ReceiptKey
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, SpeculationSummary
from outrider.gateway.tool_calls.formats import NONE
from outrider.gateway.tool_calls.plan import ReasoningTokens
from outrider.shared.draft_policy.predicted_text import PredictedText
from outrider.shared.errors import InternalError


class SpecMetricsLevel(enum.Enum):
    """Level of detail of an answer's report on its own speculation (vLLM's --per-request-spec-decode-metrics)."""

    NONE = "none"
    SUMMARY = "summary"
    DETAILED = "detailed"


@dataclass(frozen=True)
class AnswerSettings:
    """What the gateway adds to every answer. receipt_key: signs receipts; None: they are not signed."""

    tokenizer: Tokenizer
    level: SpecMetricsLevel = SpecMetricsLevel.NONE
    version: str = ""
    receipt_key: ReceiptKey | None = None


class Account:
    """The account of an answer. Pass every update to `add`; the other methods only read.

    receipt_key: signs the receipt, if the request asks for one; None: it is not signed.
    """

    def __init__(
        self, prepared: Prepared, level: SpecMetricsLevel = SpecMetricsLevel.NONE, receipt_key: ReceiptKey | None = None
    ) -> None:
        self._prepared = prepared
        self._requests = prepared.requests
        self._receipt_key = receipt_key
        # Per choice; only for the receipt.
        self._outputs: dict[int, list[int]] = {}
        self._drop_output = prepared.options.drop_output
        self._level = level
        self._num_tokens: dict[int, int] = {}
        self._num_cached = [0] * len(prepared.requests)
        self._finished: set[int] = set()
        plan = prepared.options.output
        self._reasoning = ReasoningTokens(plan) if plan is not None and plan.reasoning_parser != NONE else None
        self._speculation: list[SpeculationSummary] = []
        self._predicted: dict[int, PredictedText] = {}

    def add(self, prompt_index: int, update: GenerationUpdate) -> int:
        """Returns the choice's index in the answer."""
        choice = prompt_index * self._requests[prompt_index].n + update.choice_index
        self._num_tokens[choice] = self._num_tokens.get(choice, 0) + len(update.token_ids)
        if self._prepared.options.receipt:
            self._outputs.setdefault(choice, []).extend(update.token_ids)
        if self._reasoning is not None:
            self._reasoning.add(choice, update.token_texts)
        if predicted := self._requests[prompt_index].predicted_token_ids:
            self._predicted.setdefault(choice, PredictedText(predicted)).extend(update.token_ids)
        if update.choice_index == 0:  # later choices reuse the first one's prompt
            self._num_cached[prompt_index] = max(self._num_cached[prompt_index], update.num_cached_tokens)
        if update.finish_reason is not None:
            self._finished.add(choice)
        if update.speculation is not None:
            self._speculation.append(update.speculation)
        return choice

    def check_finished(self) -> None:
        """Raises InternalError when a choice has not finished, so that no partial answer passes as a whole one."""
        wanted = sum(request.n for request in self._requests)
        if len(self._finished) != wanted:
            raise InternalError(f"the output ended early: {len(self._finished)} of {wanted} choices finished")

    def usage(self) -> Usage:
        prompt_tokens = sum(len(request.prompt_token_ids) for request in self._requests)
        completion_tokens = 0 if self._drop_output else sum(self._num_tokens.values())
        usage: Usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }
        if self._reasoning is not None or self._predicted:
            usage["completion_tokens_details"] = self._details()
        return usage

    def _details(self) -> CompletionTokensDetails:
        details: CompletionTokensDetails = {"reasoning_tokens": self._reasoning.count if self._reasoning else 0}
        if self._predicted:
            texts = self._predicted.values()
            details["accepted_prediction_tokens"] = sum(text.num_accepted for text in texts)
            details["rejected_prediction_tokens"] = sum(text.num_rejected for text in texts)
        return details

    def choice_usage(self, prompt_index: int, choice: int) -> Usage:
        """Returns one choice's usage so far, for streams that report it in every event."""
        return self._usage_of(prompt_index, 0 if self._drop_output else self._num_tokens.get(choice, 0))

    def prompt_usage(self, prompt_index: int) -> Usage:
        """Returns the usage for an event before a choice's first token."""
        return self._usage_of(prompt_index, 0)

    def _usage_of(self, prompt_index: int, completion_tokens: int) -> Usage:
        prompt_tokens = len(self._requests[prompt_index].prompt_token_ids)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }

    def metrics(self) -> Metrics | None:
        """Returns the answer's metrics; None when turned off, or when nothing was speculated."""
        if self._level is SpecMetricsLevel.NONE or not self._speculation:
            return None
        total = add_summaries(self._speculation)
        shown = speculation_metrics(total)
        # Steps of several choices cannot be told apart in one list.
        if self._level is SpecMetricsLevel.DETAILED and len(self._speculation) == 1:
            shown["per_step_accepted"] = list(total.per_step_accepted)
            shown["per_step_drafted"] = list(total.per_step_drafted)
        return {"speculative_decoding": shown}

    def receipt(self) -> dict[str, ReceiptBody]:
        """Returns the answer's member for the receipt; empty where none is asked for."""
        if not self._prepared.options.receipt:
            return {}
        outputs = tuple(tuple(self._outputs[choice]) for choice in sorted(self._outputs))
        body = Receipt.of(self._prepared, outputs).body()
        return {"receipt": body if self._receipt_key is None else self._receipt_key.signed(body)}


def add_summaries(summaries: Sequence[SpeculationSummary]) -> SpeculationSummary:
    """Sums the counts; num_spec_tokens is the maximum."""
    histograms = [summary.acceptance_histogram for summary in summaries]
    return SpeculationSummary(
        num_spec_tokens=max(summary.num_spec_tokens for summary in summaries),
        num_spec_steps=sum(summary.num_spec_steps for summary in summaries),
        num_draft_tokens=sum(summary.num_draft_tokens for summary in summaries),
        num_accepted_draft_tokens=sum(summary.num_accepted_draft_tokens for summary in summaries),
        acceptance_histogram=tuple(sum(column) for column in zip_longest(*histograms, fillvalue=0)),
        per_step_accepted=tuple(step for summary in summaries for step in summary.per_step_accepted),
        per_step_drafted=tuple(step for summary in summaries for step in summary.per_step_drafted),
        num_emitted_tokens=sum(summary.num_emitted_tokens for summary in summaries),
        saved_us=sum(summary.saved_us for summary in summaries),
    )


def speculation_metrics(summary: SpeculationSummary) -> SpeculationMetrics:
    """Returns the metrics under vLLM's names; saved_ms is an addition."""
    return {
        "mean_acceptance_length": summary.mean_acceptance_length,
        "draft_acceptance_rate": summary.draft_acceptance_rate,
        "acceptance_histogram": list(summary.acceptance_histogram),
        "num_spec_steps": summary.num_spec_steps,
        "num_accepted_draft_tokens": summary.num_accepted_draft_tokens,
        "num_draft_tokens": summary.num_draft_tokens,
        "num_spec_tokens": summary.num_spec_tokens,
        "saved_ms": round(summary.saved_us * 1e-3, 1),
    }
