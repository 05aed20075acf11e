"""Every error that Outrider raises on purpose, as one tree.

OutriderError
├── ConfigError            a setting is wrong; names the variable and the choices
├── Unauthenticated        no API key, or an unknown one                 401  UNAUTHENTICATED
├── InvalidRequest         the caller's fault; names the field           400  INVALID_ARGUMENT
│   ├── UnknownModel                                                    404  NOT_FOUND
│   ├── PromptTooLong      the prompt does not fit the context           400  INVALID_ARGUMENT
│   ├── PayloadTooLarge                                                 413  INVALID_ARGUMENT
│   ├── NoTokenPermitted    the request's fields leave no token          400  INVALID_ARGUMENT
│   ├── RequestTooSlow     the request did not arrive in time            408  DEADLINE_EXCEEDED
│   └── ExactModeRefused   the model's rows are not invariant            400  FAILED_PRECONDITION
├── UnknownSession         no such session, or it has ended              404  NOT_FOUND
├── Overloaded             try again later                               429  RESOURCE_EXHAUSTED
│   └── QuotaExceeded      the caller's limit; has a retry time          429  RESOURCE_EXHAUSTED
├── DeadlineExceeded       the caller's own time limit has passed        504  DEADLINE_EXCEEDED
├── ReaderTooSlow          the caller did not read its stream            408  ABORTED
├── Unavailable            a component is unavailable; has a retry time  503  UNAVAILABLE
│   ├── GatewayFull        the gateway's own limits
│   ├── LogUnavailable     Redis has not answered in time
│   ├── VerifierLost       the stream to the verifier broke
│   ├── TargetReplaced     the weights of this answer are served no more  503  ABORTED
│   └── DrafterLost        the stream to the drafter broke
├── CommitRefused          the commit log refused (gap, repeat, old epoch)  409  ABORTED
└── InternalError          a bug of ours, with a reference to the log     500  INTERNAL
"""

from __future__ import annotations

# seconds; when a refused caller may try again, where it cannot be computed (admission/quotas and log_budget can)
RETRY_S = 1.0  # until one of many requests has ended, or a member of the fleet is back
LONG_BODY_RETRY_S = 2.0  # until a body of 4 MiB has been read
LOG_RETRY_S = 5.0  # until Redis may take writes again, a few of the gateway's own checks


class OutriderError(Exception):
    """Base class. `http_status` and `grpc_code`: how the HTTP and gRPC servers report it.

    `retry_after_s`: seconds until the same request may succeed; None if unknown.
    """

    http_status = 500
    grpc_code = "INTERNAL"
    openai_type = "internal_error"
    retry_after_s: float | None = None

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if retry_after_s is not None:
            self.retry_after_s = retry_after_s


class ConfigError(OutriderError):
    """A setting is missing or wrong."""


class Unauthenticated(OutriderError):
    """The request has no API key, or an unknown one."""

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


class PromptTooLong(InvalidRequest):
    """The prompt does not fit the model's context. num_tokens: of it, at least."""

    def __init__(self, message: str, *, param: str | None = None, num_tokens: int = 0) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens


class PayloadTooLarge(InvalidRequest):
    """The request's body exceeds the limit."""

    http_status = 413


class NoTokenPermitted(InvalidRequest):
    """Grammar, allowed_token_ids and bad_words together leave no token that could come next."""


class RequestTooSlow(InvalidRequest):
    """The request's body did not arrive in time."""

    http_status = 408
    grpc_code = "DEADLINE_EXCEEDED"


class ExactModeRefused(InvalidRequest):
    """Exact mode was requested, but the certificate does not hold for this model on this device."""

    grpc_code = "FAILED_PRECONDITION"


class UnknownSession(OutriderError):
    """No session of this name, or it has ended."""

    http_status = 404
    grpc_code = "NOT_FOUND"
    openai_type = "not_found_error"


class Overloaded(OutriderError):
    """A bounded queue is full; the caller should retry later."""

    http_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    openai_type = "rate_limit_error"
    retry_after_s = RETRY_S


class QuotaExceeded(Overloaded):
    """The caller's own limit of concurrent requests, of tokens per minute or of bytes in the log."""


class DeadlineExceeded(OutriderError):
    """The caller's time limit for the request has passed."""

    http_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    openai_type = "timeout_error"


class ReaderTooSlow(OutriderError):
    """The stream was cut because the caller left it unread for too long."""

    http_status = 408
    grpc_code = "ABORTED"
    openai_type = "timeout_error"


class Unavailable(OutriderError):
    """A component that the request needs is unavailable; most are back within seconds."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    openai_type = "service_unavailable_error"
    retry_after_s = RETRY_S


class GatewayFull(Unavailable):
    """The gateway's limit of requests, of bytes in flight or of bytes in the log is reached."""


class LogUnavailable(Unavailable):
    """Redis has not answered in time. What is in the log stays there, and can be continued from it."""


class VerifierLost(Unavailable):
    """The stream to the verifier broke; the session can continue at another one."""


class TargetReplaced(Unavailable):
    """The target's weights that the answer was begun with are served no more; it is not continued on others."""

    grpc_code = "ABORTED"
    # between verifier and gateway, tells it from CommitRefused; also in the body of the answer to a client
    PARAM = "weights"

    def __init__(self, message: str) -> None:
        super().__init__(message, param=self.PARAM)


class DrafterLost(Unavailable):
    """The stream to the drafter broke; the session continues without it."""


class CommitRefused(OutriderError):
    """The commit log refused an append: a gap, a repeat, or a superseded epoch."""

    http_status = 409
    grpc_code = "ABORTED"
    openai_type = "conflict_error"


class InternalError(OutriderError):
    """A bug of ours."""
