"""Streams a completion token by token for the CLI: a thin layer over the Python client (api/blocking.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from outrider.client.api.access import Access
from outrider.client.api.blocking import OutriderClient
from outrider.client.api.results import Completion
from outrider.shared.request_params import SamplingParams, Speculation

__all__ = ["Access", "CompletionRequest", "StreamEnd", "StreamedToken", "stream_completion"]


@dataclass(frozen=True)
class StreamedToken:
    token_id: int
    text: str
    # "target", "accepted", "corrected" or "bonus"
    origin: str


@dataclass(frozen=True)
class StreamEnd:
    """The last item of a stream. num_resumes: connections lost on the way."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    mean_acceptance_length: float
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_resumes: int = 0

    @classmethod
    def of(cls, completion: Completion) -> StreamEnd:
        figures = completion.speculation
        return cls(
            finish_reason=completion.finish_reason,
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=completion.usage.completion_tokens,
            mean_acceptance_length=figures.mean_acceptance_length,
            num_spec_steps=figures.num_spec_steps,
            num_accepted_draft_tokens=figures.num_accepted_draft_tokens,
            num_draft_tokens=figures.num_draft_tokens,
            num_resumes=completion.num_resumes,
        )


@dataclass(frozen=True)
class CompletionRequest:
    prompt: str
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    method: str = "auto"
    num_speculative_tokens: int = 0
    # Generate past the end-of-sequence token, up to max_tokens.
    ignore_eos: bool = False
    # What the output will be, as far as it is known.
    prediction: str = ""


def stream_completion(
    address: str | Sequence[str], request: CompletionRequest, access: Access | None = None
) -> Iterator[StreamedToken | StreamEnd]:
    """Streams tokens as they are committed, then one StreamEnd.

    address: several as a list or comma-separated; if one is lost, the next is tried. Before the first token each
    address is tried once. After it, the stream continues as long as some gateway delivers new tokens.
    Raises InvalidRequest, Unavailable or another OutriderError.
    """
    access = access or Access()
    params = SamplingParams(
        temperature=request.temperature,
        max_tokens=request.max_tokens,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        prediction=request.prediction,
        speculation=Speculation(method=request.method, num_speculative_tokens=request.num_speculative_tokens),
    )
    client = OutriderClient(address, api_key=access.api_key, tls=access.tls, timeout_s=None, max_retries=0)
    with client, closing(client.stream(request.prompt, params)) as updates:
        for update in updates:
            for token in update.tokens:
                yield StreamedToken(token.token_id, token.text, token.origin)
            if update.completion is not None:
                yield StreamEnd.of(update.completion)
