"""Streams a completion from a gateway over gRPC, and goes on at another one when the connection is lost.

The request's id is made here, so that it can be asked for again; what has been received is never asked for twice.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import grpc

from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from shared.errors import InvalidRequest, OutriderError, Unavailable
from shared.rpc import CHANNEL_OPTIONS
from shared.tls import TlsConfig, channel_credentials

_ORIGINS = {1: "target", 2: "accepted", 3: "corrected", 4: "bonus"}
# Attempts without a new token before the stream is given up, and the pauses between them. A gateway that is restarted
# is back within a few seconds.
MAX_FRUITLESS_ATTEMPTS = 8
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True)
class StreamedToken:
    token_id: int
    text: str
    # "target", "accepted", "corrected" or "bonus"
    origin: str


@dataclass(frozen=True)
class StreamEnd:
    """The last item of a stream; `num_resumes` connections were lost on the way."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    mean_acceptance_length: float
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_resumes: int = 0


@dataclass(frozen=True)
class CompletionRequest:
    prompt: str
    max_tokens: int = 128
    temperature: float = 0.0
    seed: int | None = None
    method: str = "auto"
    num_speculative_tokens: int = 0
    # Goes on past the model's own end, up to max_tokens.
    ignore_eos: bool = False


@dataclass(frozen=True)
class Access:
    """How a gateway is reached: an API key, and TLS where `tls` is not None (its paths may be empty)."""

    api_key: str = ""
    tls: TlsConfig | None = None

    def channel(self, address: str) -> grpc.Channel:
        if self.tls is None:
            return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        return grpc.secure_channel(address, channel_credentials(self.tls), options=CHANNEL_OPTIONS)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()


def stream_completion(
    address: str | Sequence[str], request: CompletionRequest, access: Access | None = None
) -> Iterator[StreamedToken | StreamEnd]:
    """Tokens as they are committed, then one StreamEnd. Of several addresses (or one text with commas between them)
    the next one is asked when one is lost.

    Before the first token every address is asked once; after it the stream goes on as long as some gateway brings new
    tokens. Raises InvalidRequest, Unavailable or OutriderError.
    """
    addresses = [part.strip() for part in address.split(",")] if isinstance(address, str) else list(address)
    if not addresses:
        raise InvalidRequest("no address of a gateway was given", param="address")
    session = _Session(request, access or Access())
    place = num_fruitless = 0
    while True:
        num_received = session.num_received
        try:
            yield from session.attempt(addresses[place % len(addresses)])
            return
        except _ConnectionLost as lost:
            num_fruitless = 0 if session.num_received > num_received else num_fruitless + 1
            limit = MAX_FRUITLESS_ATTEMPTS if session.num_received else len(addresses)
            if num_fruitless >= limit:
                raise Unavailable(f"{lost.message} ({session.num_received} tokens were received)") from None
        place += 1
        if num_fruitless:
            time.sleep(min(_FIRST_PAUSE_S * 2 ** (num_fruitless - 1), _LONGEST_PAUSE_S))


class _ConnectionLost(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class _Session:
    """One request over as many connections as it takes."""

    def __init__(self, request: CompletionRequest, access: Access) -> None:
        self._request = request
        self._access = access
        self._request_id = f"gen-{uuid.uuid4().hex}"
        self._num_attempts = 0
        self.num_received = 0

    def attempt(self, address: str) -> Iterator[StreamedToken | StreamEnd]:
        """What follows, from one gateway. Raises _ConnectionLost when another one may know more."""
        is_first = self._num_attempts == 0
        self._num_attempts += 1
        resumes = not is_first
        with self._access.channel(address) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            for _ in range(3):
                try:
                    yield from self._tokens(self._call(stub, resumes))
                    return
                except grpc.RpcError as error:
                    code = error.code()
                    if resumes and code is grpc.StatusCode.NOT_FOUND and not self.num_received:
                        resumes = False  # the first gateway was lost before it had written down what was asked for
                    elif not resumes and code is grpc.StatusCode.ABORTED and not is_first:
                        resumes = True  # or it had, just now
                    else:
                        raise _translated(error) from None
        raise _ConnectionLost(f"{address} neither knows the request nor takes it")

    def _call(self, stub: gateway_pb2_grpc.GatewayStub, resumes: bool) -> Iterator[gateway_pb2.GenerateReply]:
        metadata = self._access.metadata
        if resumes:
            return stub.Resume(self._resume_message(), metadata=metadata)
        return stub.Generate(self._message(), metadata=metadata)

    def _tokens(self, call: Iterator[gateway_pb2.GenerateReply]) -> Iterator[StreamedToken | StreamEnd]:
        for reply in call:
            if reply.base_len != self.num_received:
                raise OutriderError(f"output token {self.num_received} was due, {reply.base_len} came")
            for token_id, text, origin in zip(reply.token_ids, reply.token_texts, reply.origins, strict=True):
                self.num_received += 1
                yield StreamedToken(token_id, text, _ORIGINS[origin])
            if reply.finish_reason:
                yield _end(reply, self._num_attempts - 1)
                return
        raise _ConnectionLost("the stream ended early")

    def _message(self) -> gateway_pb2.GenerateRequest:
        request = self._request
        return gateway_pb2.GenerateRequest(
            request_id=self._request_id,
            prompt=request.prompt,
            sampling_params=common_pb2.SamplingParams(
                temperature=request.temperature,
                top_p=1.0,
                max_tokens=request.max_tokens,
                seed=request.seed,
                ignore_eos=request.ignore_eos,
            ),
            speculation=gateway_pb2.Speculation(
                method=request.method, num_speculative_tokens=request.num_speculative_tokens
            ),
        )

    def _resume_message(self) -> gateway_pb2.ResumeRequest:
        return gateway_pb2.ResumeRequest(request_id=self._request_id, base_len=self.num_received)


def _end(reply: gateway_pb2.GenerateReply, num_resumes: int) -> StreamEnd:
    figures = reply.speculation
    return StreamEnd(
        finish_reason=common_pb2.FinishReason.Name(reply.finish_reason).removeprefix("FINISH_REASON_").lower(),
        prompt_tokens=reply.usage.prompt_tokens,
        completion_tokens=reply.usage.completion_tokens,
        mean_acceptance_length=figures.mean_acceptance_length,
        num_spec_steps=figures.num_spec_steps,
        num_accepted_draft_tokens=figures.num_accepted_draft_tokens,
        num_draft_tokens=figures.num_draft_tokens,
        num_resumes=num_resumes,
    )


def _translated(error: grpc.RpcError) -> Exception:
    """_ConnectionLost where another attempt may help."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE or (code is grpc.StatusCode.INTERNAL and "RST_STREAM" in details):
        return _ConnectionLost(details)
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return InvalidRequest(details)
    return OutriderError(f"{code.name}: {details}")
