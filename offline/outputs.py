"""The results under vLLM's names, and how a request's updates are collected into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.gateway.openai.answer_types import SpeculationMetrics
from outrider.gateway.openai.usage import add_summaries, speculation_metrics
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import GenerationUpdate, SpeculationSummary, ValidRequest
from outrider.shared.messages import FinishReason, TokenLogprob


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

    finish_reason: None while it is being written. stop_reason: the stop string or stop token id that ended it; None:
    end of sequence, or length.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[TokenLogprobs] | None
    finish_reason: str | None
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
    """One choice so far. logprobs: None unless requested. given_*: what earlier outputs had, for the difference."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    cumulative_logprob: float = 0.0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    given_texts: int = 0
    given_tokens: int = 0
    given_end: bool = False

    @property
    def has_news(self) -> bool:
        return len(self.texts) > self.given_texts or (self.finish_reason is not None and not self.given_end)

    def add(self, update: GenerationUpdate, tokenizer: Tokenizer) -> None:
        self.token_ids.extend(update.token_ids)
        self.texts.append(update.text)
        if self.logprobs is not None:
            self.logprobs += _shown(tokenizer, update.token_ids, update.logprobs)
            self.cumulative_logprob += sum(entry.logprob for entry in update.logprobs)
        if update.finish_reason is not None:
            self.finish_reason = update.finish_reason.name.lower()
            self.stop_reason = update.stop_reason

    def output(self, index: int, *, delta: bool) -> CompletionOutput:
        first_text, first_token = (self.given_texts, self.given_tokens) if delta else (0, 0)
        self.given_texts, self.given_tokens = len(self.texts), len(self.token_ids)
        self.given_end = self.finish_reason is not None
        return CompletionOutput(
            index=index,
            text="".join(self.texts[first_text:]),
            token_ids=self.token_ids[first_token:],
            cumulative_logprob=None if self.logprobs is None else self.cumulative_logprob,
            logprobs=None if self.logprobs is None else self.logprobs[first_token:],
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


class Gathering:
    """Collects the updates of one request."""

    def __init__(self, request: ValidRequest, prompt: str | None, tokenizer: Tokenizer) -> None:
        self._request = request
        self._prompt = prompt
        self._prompt_token_ids = list(request.prompt_token_ids)
        self._tokenizer = tokenizer
        has_logprobs = request.sampling_params.num_logprobs is not None
        self._choices = [_Choice(logprobs=[] if has_logprobs else None) for _ in range(request.n)]
        self._prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._num_cached_tokens = 0
        self._speculation: list[SpeculationSummary] = []
        self._first_token_s: float | None = None

    def add(self, update: GenerationUpdate, elapsed_s: float) -> None:
        if self._first_token_s is None:
            self._first_token_s = elapsed_s
        self._choices[update.choice_index].add(update, self._tokenizer)
        if self._prompt_logprobs is None and self._request.sampling_params.num_prompt_logprobs is not None:
            rows = _shown(self._tokenizer, self._prompt_token_ids[1:], update.prompt_logprobs[1:])
            self._prompt_logprobs = [None, *rows]  # the first token has no log-probability
        if update.choice_index == 0:  # later choices reuse the first one's prompt
            self._num_cached_tokens += update.num_cached_tokens
        if update.speculation is not None:
            self._speculation.append(update.speculation)

    @property
    def finished(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices)

    def abort(self) -> None:
        """Ends the choices that are still written, as aborted."""
        for choice in self._choices:
            choice.finish_reason = choice.finish_reason or FinishReason.ABORT.name.lower()

    def output(self, elapsed_s: float, *, delta: bool = False) -> RequestOutput:
        """Returns the request's output so far. delta: only what no earlier output had."""
        total = add_summaries(self._speculation) if self._speculation else None  # of choices that have finished
        return RequestOutput(
            request_id=self._request.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs,
            outputs=[
                choice.output(index, delta=delta)
                for index, choice in enumerate(self._choices)
                if choice.has_news or not delta
            ],
            metrics=RequestMetrics(
                first_token_s=elapsed_s if self._first_token_s is None else self._first_token_s,
                total_s=elapsed_s,
                speculative_decoding=speculation_metrics(total) if total and total.num_spec_tokens else None,
            ),
            num_cached_tokens=self._num_cached_tokens,
            finished=self.finished,
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
