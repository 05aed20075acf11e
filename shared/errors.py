"""Every error that Outrider raises on purpose, as one tree.

OutriderError
├── ConfigError            a setting is wrong; names the variable and the choices
├── Unauthenticated        no API key, or none that is known             401  UNAUTHENTICATED
├── InvalidRequest         the caller's fault; names the field           400  INVALID_ARGUMENT
│   ├── UnknownModel                                                    404  NOT_FOUND
│   ├── PayloadTooLarge                                                 413  INVALID_ARGUMENT
│   ├── RequestTooSlow     the request did not arrive in time            408  DEADLINE_EXCEEDED
│   └── ExactModeRefused   the model's rows are not invariant            400  FAILED_PRECONDITION
├── UnknownSession         no such session, or it has ended              404  NOT_FOUND
├── Overloaded             try again later                               429  RESOURCE_EXHAUSTED
│   └── QuotaExceeded      the key's own limit; says when to try again   429  RESOURCE_EXHAUSTED
├── DeadlineExceeded       the caller's own time limit has passed        504  DEADLINE_EXCEEDED
├── ReaderTooSlow          the caller did not read its stream            408  ABORTED
├── Unavailable            a part that is needed is not there            503  UNAVAILABLE
│   ├── GatewayFull        the gateway's bound; says when to try again
│   ├── VerifierLost       the stream to the verifier broke
│   └── DrafterLost        the stream to the drafter broke
├── CommitRefused          the commit log said no (gap, repeat, old epoch)  409  ABORTED
└── InternalError          a bug of ours, with a reference to the log     500  INTERNAL
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all; `http_status` and `grpc_code` say how the two doors report it.

    `retry_after_s`: seconds after which the same request may succeed; None says nothing about it.
    """

    http_status = 500
    grpc_code = "INTERNAL"
    openai_type = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(OutriderError):
    """A setting is missing or wrong."""


class Unauthenticated(OutriderError):
    """The request carries no API key, or none that is known here."""

    http_status = 401
    grpc_code = "UNAUTHENTICATED"
    openai_type = "authentication_error"


class InvalidRequest(OutriderError):
    """The caller's request cannot be served as it is; `param` names the field."""

    http_status = 400
    grpc_code = "INVALID_ARGUMENT"
    openai_type = "invalid_request_error"


class UnknownModel(InvalidRequest):
    """The request names a model that is not served."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    openai_type = "not_found_error"


class PayloadTooLarge(InvalidRequest):
    """The request's body is over the limit."""

    http_status = 413


class RequestTooSlow(InvalidRequest):
    """The request's body did not arrive in time."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"


class ExactModeRefused(InvalidRequest):
    """Exact mode was asked for, and the certificate does not hold for this model on this device."""

    grpc_code = "FAILED_PRECONDITION"


class UnknownSession(OutriderError):
    """No session of that name, or it has ended."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    openai_type = "not_found_error"


class Overloaded(OutriderError):
    """A bounded queue is full; the caller should wait and try again."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    retry_after_s = 1.0


class QuotaExceeded(Overloaded):
    """The API key's own limit of concurrent requests or of tokens per minute."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(OutriderError):
    """The time that the caller gave the request has passed."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"


class ReaderTooSlow(OutriderError):
    """The caller has not read its stream for so long that it was cut."""

    http_status = 408
    grpc_code = "ABORTED"
    openai_type = "timeout_error"


class Unavailable(OutriderError):
    """A part that the request needs is not there now."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    openai_type = "service_unavailable_error"


class GatewayFull(Unavailable):
    """As many requests as the gateway takes are running or waiting."""

    retry_after_s = 1.0


class VerifierLost(Unavailable):
    """The stream to the verifier broke; the session can go on at another one."""


class DrafterLost(Unavailable):
    """The stream to the drafter broke; the session goes on without it."""


class CommitRefused(OutriderError):
    """The commit log refused an append: a gap, a repeat, or an epoch that has been passed on."""

    http_status = 409
    grpc_code = "ABORTED"
    openai_type = "conflict_error"


class InternalError(OutriderError):
    """A bug of ours."""
