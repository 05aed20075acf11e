"""The results of requests: tokens, updates, completions, and the error of a partly failed batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.shared.errors import OutriderError
from outrider.shared.wire import from_message
from outrider.v1 import common_pb2, gateway_pb2

_ORIGINS = {1: "target", 2: "accepted", 3: "corrected", 4: "bonus"}


@dataclass(frozen=True)
class Logprob:
    """A token's log-probability.

    rank: 1 is the likeliest token. top: ids and log-probabilities of the likeliest tokens, if requested.
    """

    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Token:
    """A generated token.

    text: the text this token completed, shown or held back. origin: "target", "accepted", "corrected" or "bonus".
    """

    token_id: int
    text: str
    origin: str
    logprob: Logprob | None = None


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


@dataclass(frozen=True)
class SpeculationFigures:
    """The speculation figures of an answer; all 0 if nothing was drafted.

    acceptance_histogram[k]: rounds with k accepted draft tokens.
    """

    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: tuple[int, ...]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    # Estimated time saved over plain decoding; negative: speculation has cost time.
    saved_ms: float = 0.0


@dataclass(frozen=True)
class Completion:
    """A whole answer. finish_reason: "stop", "length" or "abort".

    text ends before the matched stop string (`stop_reason`); `tokens` has every generated token.
    num_resumes: connections lost on the way.
    """

    request_id: str
    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    stop_reason: str | None
    usage: Usage
    speculation: SpeculationFigures
    num_resumes: int = 0

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token.token_id for token in self.tokens)

    @property
    def cumulative_logprob(self) -> float | None:
        """The sum of the tokens' log-probabilities; None without log-probabilities."""
        entries = [token.logprob.logprob for token in self.tokens if token.logprob is not None]
        return sum(entries) if len(entries) == len(self.tokens) else None


@dataclass(frozen=True)
class Update:
    """The result of one commit. text: text that may be shown now. completion: only in the last update."""

    text: str
    tokens: tuple[Token, ...]
    completion: Completion | None = None


class BatchFailed(OutriderError):
    """Raised once every prompt of a batch has ended, so that one error loses no other completion.

    completions: in the order of the prompts, None where one failed. failures: index of the prompt -> its error.
    """

    def __init__(self, completions: Sequence[Completion | None], failures: Mapping[int, OutriderError]) -> None:
        first = min(failures)
        super().__init__(
            f"{len(failures)} of {len(completions)} prompts failed, first prompt {first}: "
            f"{failures[first].message}; `completions` of this error has the others",
            param=failures[first].param,
        )
        self.completions = list(completions)
        self.failures = dict(failures)


def tokens_of(reply: gateway_pb2.GenerateReply) -> tuple[Token, ...]:
    """Returns a reply's tokens. Raises ValueError when the reply's lists differ in length."""
    logprobs: list[Logprob | None] = [_logprob(entry) for entry in reply.logprobs]
    logprobs = logprobs or [None] * len(reply.token_ids)
    columns = zip(reply.token_ids, reply.token_texts, reply.origins, logprobs, strict=True)
    return tuple(Token(token_id, text, _ORIGINS[origin], logprob) for token_id, text, origin, logprob in columns)


def completion_of(reply: gateway_pb2.GenerateReply, text: str, tokens: Sequence[Token], num_resumes: int) -> Completion:
    """The completion, from the last reply and what came before it."""
    usage = reply.usage
    return Completion(
        request_id=reply.request_id,
        text=text,
        tokens=tuple(tokens),
        finish_reason=common_pb2.FinishReason.Name(reply.finish_reason).removeprefix("FINISH_REASON_").lower(),
        stop_reason=reply.stop_reason or None,
        usage=Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens),
        speculation=from_message(SpeculationFigures, reply.speculation),
        num_resumes=num_resumes,
    )


def _logprob(entry: common_pb2.TokenLogprob) -> Logprob:
    return Logprob(entry.logprob, entry.rank, tuple(zip(entry.top_token_ids, entry.top_logprobs, strict=True)))
