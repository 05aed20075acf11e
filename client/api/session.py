"""One request over any number of connections, without I/O: what to call next, and what a reply means.

The client chooses the request id, so any gateway can resume the request. No token is requested twice, so a retry is
always safe. Not here: the calls themselves (blocking.py, asynchronous.py).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.client.api.results import Completion, Token, Update, completion_of, tokens_of
from outrider.shared.errors import (
    DeadlineExceeded,
    ExactModeRefused,
    InternalError,
    InvalidRequest,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    UnknownSession,
)
from outrider.v1 import gateway_pb2

# calls; a stream is given up after this many in a row without a new token. With the pauses between them this outlasts a
# gateway's restart (seconds).
MAX_FRUITLESS_ATTEMPTS = 8
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0
# calls; "unknown" and "already exists" may alternate once, while a lost gateway's last write arrives
_MAX_CONTRADICTIONS = 2
# The gateway's messages begin with the field's name (shared/rpc.py).
_FIELD = re.compile(r"([a-z_.]+): ")
_ERRORS: dict[grpc.StatusCode, type[OutriderError]] = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.FAILED_PRECONDITION: ExactModeRefused,
    grpc.StatusCode.UNAUTHENTICATED: Unauthenticated,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
    grpc.StatusCode.INTERNAL: InternalError,
}


@dataclass(frozen=True)
class CallFailure:
    """The failure of a call that ended without its last reply. retry_after_s: the server's hint."""

    code: grpc.StatusCode
    details: str
    retry_after_s: float = 0.0

    @classmethod
    def of(cls, error: Any) -> CallFailure:
        """Builds it from the grpc.RpcError of either kind of channel."""
        trailers = dict(error.trailing_metadata() or ())
        return cls(error.code(), error.details() or "", int(trailers.get("retry-after-ms", 0)) / 1000)

    @property
    def is_loss(self) -> bool:
        """True if another attempt may help: the connection or server is lost, or the server is full."""
        broken = self.code is grpc.StatusCode.INTERNAL and "RST_STREAM" in self.details
        full = self.code is grpc.StatusCode.RESOURCE_EXHAUSTED and self.retry_after_s > 0
        return broken or full or self.code is grpc.StatusCode.UNAVAILABLE


ENDED_EARLY = CallFailure(grpc.StatusCode.UNAVAILABLE, "the stream ended early")


def stalled(stall_timeout_s: float) -> CallFailure:
    return CallFailure(grpc.StatusCode.UNAVAILABLE, f"nothing came for {stall_timeout_s:g} s")


@dataclass(frozen=True)
class Attempt:
    """A call to make after a pause: Resume with a ResumeRequest, else Generate. timeout_s: its gRPC deadline."""

    address: str
    message: gateway_pb2.GenerateRequest | gateway_pb2.ResumeRequest
    pause_s: float
    timeout_s: float | None


class GenerationSession:
    """A request's state machine: make the `next_attempt`, pass each reply to `receive` and a failure to `failed`, until
    `finished`.

    max_retries: retries of each address before the first token. timeout_s: for the whole request.
    """

    def __init__(
        self,
        message: gateway_pb2.GenerateRequest,
        addresses: Sequence[str],
        *,
        max_retries: int,
        timeout_s: float | None,
    ) -> None:
        self._message = message
        self._addresses = addresses
        self._num_first_attempts = len(addresses) * (1 + max_retries)
        self._timeout_s = timeout_s
        self._deadline_at = None if timeout_s is None else time.monotonic() + timeout_s
        self._tokens: list[Token] = []
        self._epoch = 0
        self._texts: list[str] = []
        self._num_losses = self._num_fruitless = self._num_contradictions = 0
        self._num_before_attempt = 0
        self._resumes = False
        self._pause_s = 0.0
        self.completion: Completion | None = None

    @property
    def finished(self) -> bool:
        return self.completion is not None

    def result(self) -> Completion:
        """The completion of a finished session."""
        if self.completion is None:
            raise OutriderError("the output has not ended yet")
        return self.completion

    def next_attempt(self) -> Attempt:
        """Returns the next call. Raises DeadlineExceeded if the pause before it would exceed the time limit."""
        left_s = None if self._deadline_at is None else self._deadline_at - time.monotonic()
        if left_s is not None and left_s <= self._pause_s:
            raise self._too_late()
        message: gateway_pb2.GenerateRequest | gateway_pb2.ResumeRequest = self._message
        if self._resumes:
            message = gateway_pb2.ResumeRequest(
                request_id=self._message.request_id, base_len=len(self._tokens), epoch=self._epoch or None
            )
        self._num_before_attempt = len(self._tokens)
        address = self._addresses[self._num_losses % len(self._addresses)]
        return Attempt(address, message, self._pause_s, None if left_s is None else left_s - self._pause_s)

    def receive(self, reply: gateway_pb2.GenerateReply) -> Update:
        """Adds a reply to the output. Raises OutriderError for one that does not continue what was received."""
        if reply.base_len != len(self._tokens):
            raise OutriderError(f"expected output token {len(self._tokens)}, got {reply.base_len}")
        tokens = tokens_of(reply)
        self._tokens.extend(tokens)
        self._epoch = reply.epoch
        self._texts.append(reply.text)
        if reply.finish_reason:
            self.completion = completion_of(reply, "".join(self._texts), self._tokens, self._num_losses)
        return Update(reply.text, tokens, self.completion)

    def failed(self, failure: CallFailure) -> None:
        """Returns when another attempt may help. Raises the typed error when none can."""
        if self._contradicts(failure):
            self._num_contradictions += 1
            self._resumes = not self._resumes
            self._pause_s = 0.0
            if self._num_contradictions > _MAX_CONTRADICTIONS:
                failure = CallFailure(grpc.StatusCode.UNAVAILABLE, "it neither knows the request nor takes it")
            else:
                return
        if failure.code is grpc.StatusCode.DEADLINE_EXCEEDED:
            raise self._too_late()
        if not failure.is_loss:
            raise self._error(failure)
        self._num_losses += 1
        self._num_contradictions = 0
        self._num_fruitless = 0 if len(self._tokens) > self._num_before_attempt else self._num_fruitless + 1
        limit = MAX_FRUITLESS_ATTEMPTS if self._tokens else self._num_first_attempts
        if self._num_fruitless >= limit:
            raise self._error(failure)
        self._resumes = True
        pause_s = min(FIRST_PAUSE_S * 2 ** (self._num_fruitless - 1), LONGEST_PAUSE_S) if self._num_fruitless else 0.0
        self._pause_s = max(pause_s, failure.retry_after_s)

    def _contradicts(self, failure: CallFailure) -> bool:
        if self._resumes:  # the first gateway was lost before it had stored the request
            return failure.code is grpc.StatusCode.NOT_FOUND and not self._tokens
        # or it had stored it just now
        return failure.code is grpc.StatusCode.ABORTED and self._num_losses > 0

    def _error(self, failure: CallFailure) -> OutriderError:
        if failure.code is grpc.StatusCode.NOT_FOUND:
            kind: type[OutriderError] = UnknownSession if self._resumes else UnknownModel
        else:
            kind = _ERRORS.get(failure.code, OutriderError)
        message = failure.details if kind is not OutriderError else f"{failure.code.name}: {failure.details}"
        if kind is Unavailable:
            message += f" ({len(self._tokens)} tokens were received)"
        named = _FIELD.match(failure.details) if kind is InvalidRequest else None
        error = kind(message, param=named[1] if named else None)
        if failure.retry_after_s:
            error.retry_after_s = failure.retry_after_s
        return error

    def _too_late(self) -> DeadlineExceeded:
        limit = "its time limit" if self._timeout_s is None else f"{self._timeout_s:g} s"
        return DeadlineExceeded(f"the request did not end within {limit} ({len(self._tokens)} tokens were received)")
