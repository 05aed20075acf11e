"""Streams a completion from a gateway over gRPC."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from shared.errors import InvalidRequest, OutriderError, Unavailable

_ORIGINS = {1: "target", 2: "accepted", 3: "corrected", 4: "bonus"}


@dataclass(frozen=True)
class StreamedToken:
    token_id: int
    text: str
    # "target", "accepted", "corrected" or "bonus"
    origin: str


@dataclass(frozen=True)
class StreamEnd:
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    mean_acceptance_length: float
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int


@dataclass(frozen=True)
class CompletionRequest:
    prompt: str
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    method: str = "auto"
    num_speculative_tokens: int = 0


def stream_completion(address: str, request: CompletionRequest) -> Iterator[StreamedToken | StreamEnd]:
    """Tokens as they are committed, then one StreamEnd. Raises InvalidRequest, Unavailable or OutriderError."""
    message = gateway_pb2.GenerateRequest(
        prompt=request.prompt,
        sampling_params=common_pb2.SamplingParams(
            temperature=request.temperature, top_p=1.0, max_tokens=request.max_tokens, seed=request.seed
        ),
        speculation=gateway_pb2.Speculation(
            method=request.method, num_speculative_tokens=request.num_speculative_tokens
        ),
    )
    with grpc.insecure_channel(address) as channel:
        stub = gateway_pb2_grpc.GatewayStub(channel)
        try:
            for reply in stub.Generate(message):
                for token_id, text, origin in zip(reply.token_ids, reply.token_texts, reply.origins, strict=True):
                    yield StreamedToken(token_id, text, _ORIGINS[origin])
                if reply.finish_reason:
                    yield _end(reply)
        except grpc.RpcError as error:
            raise _as_outrider_error(error) from None


def _end(reply: gateway_pb2.GenerateReply) -> StreamEnd:
    figures = reply.speculation
    return StreamEnd(
        finish_reason=common_pb2.FinishReason.Name(reply.finish_reason).removeprefix("FINISH_REASON_").lower(),
        prompt_tokens=reply.usage.prompt_tokens,
        completion_tokens=reply.usage.completion_tokens,
        mean_acceptance_length=figures.mean_acceptance_length,
        num_spec_steps=figures.num_spec_steps,
        num_accepted_draft_tokens=figures.num_accepted_draft_tokens,
        num_draft_tokens=figures.num_draft_tokens,
    )


def _as_outrider_error(error: grpc.RpcError) -> OutriderError:
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(details)
    if code is grpc.StatusCode.UNAVAILABLE:
        return Unavailable(details)
    return OutriderError(f"{code.name}: {details}")
