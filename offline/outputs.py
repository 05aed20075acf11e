"""The results under vLLM's names, and how a request's updates are collected into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.gateway.openai.answer_types import SpeculationMetrics
from outrider.gateway.openai.usage import add_summaries, speculation_metrics
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, SpeculationSummary, ValidRequest
from outrider.shared.messages import TokenLogprob


@dataclass(frozen=True)
class Logprob:
    """rank: from 1, the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


# Per token: the chosen token, and the requested number of likeliest ones.
TokenLogprobs = dict[int, Logprob]


@dataclass(frozen=True)
class CompletionOutput:
    """One choice. cumulative_logprob and logprobs are None unless `logprobs` was requested.

    stop_reason: the stop string or stop token id that ended it; None: end of sequence, or length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str
    stop_reason: str | int | None


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds since the request's turn began; speculative_decoding is None without speculation."""

    first_token_s: float
    total_s: float
    speculative_decoding: SpeculationMetrics | None


@dataclass(frozen=True)
class RequestOutput:
    """One prompt and its `n` outputs. prompt: None where token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprobs | None] | None
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    num_cached_tokens: int
    finished: bool = True


@dataclass
class _Choice:
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str = ""
    stop_reason: str | int | None = None

    def add(self, update: GenerationUpdate) -> None:
        self.token_ids.extend(update.token_ids)
        self.texts.append(update.text)
        self.logprobs.extend(update.logprobs)
        if update.finish_reason is not None:
            self.finish_reason = update.finish_reason.name.lower()
            self.stop_reason = update.stop_reason

    def output(self, index: int, tokenizer: Tokenizer, has_logprobs: bool) -> CompletionOutput:
        return CompletionOutput(
            index=index,
            text="".join(self.texts),
            token_ids=self.token_ids,
            cumulative_logprob=sum(entry.logprob for entry in self.logprobs) if has_logprobs else None,
            logprobs=_shown(tokenizer, self.token_ids, self.logprobs) if has_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Gathering:
    """Collects the updates of one request."""

    def __init__(self, request: ValidRequest, prompt: str | None, tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompt = prompt
        self._tokenizer = tokenizer
        self._choices = [_Choice() for _ in range(request.n)]
        self._prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self._num_cached_tokens = 0
        self._speculation: list[SpeculationSummary] = []
        self._first_token_s: float | None = None

    def add(self, update: GenerationUpdate, elapsed_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = elapsed_s
        self._choices[update.choice_index].add(update)
        self._prompt_logprobs = self._prompt_logprobs or update.prompt_logprobs
        if update.choice_index == 0:  # later choices reuse the first one's prompt
            self._num_cached_tokens += update.num_cached_tokens
        if update.speculation is not None:
            self._speculation.append(update.speculation)

    def output(self, elapsed_s: float) -> RequestOutput:
        request, params = self._request, self._request.sampling_params
        total = add_summaries(self._speculation)
        prompt_ids = list(request.prompt_token_ids)
        prompt_logprobs: list[TokenLogprobs | None] | None = None
        if params.num_prompt_logprobs is not None:  # the first token has no log-probability
            prompt_logprobs = [None, *_shown(self._tokenizer, prompt_ids[1:], self._prompt_logprobs[1:])]
        return RequestOutput(
            request_id=request.request_id,
            prompt=self._prompt,
            prompt_token_ids=prompt_ids,
            prompt_logprobs=prompt_logprobs,
            outputs=[
                choice.output(index, self._tokenizer, params.num_logprobs is not None)
                for index, choice in enumerate(self._choices)
            ],
            metrics=RequestMetrics(
                first_token_s=elapsed_s if self._first_token_s is None else self._first_token_s,
                total_s=elapsed_s,
                speculative_decoding=speculation_metrics(total) if total.num_spec_tokens else None,
            ),
            num_cached_tokens=self._num_cached_tokens,
        )


def _shown(tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> list[TokenLogprobs]:
    rows: list[TokenLogprobs] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        row = {token_id: Logprob(entry.logprob, entry.rank, tokenizer.token_text(token_id))}
        tops = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        for rank, (other, logprob) in enumerate(tops, start=1):
            row.setdefault(other, Logprob(logprob, rank, tokenizer.token_text(other)))
        rows.append(row)
    return rows
