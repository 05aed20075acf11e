"""Every error that Outrider raises on purpose, as one tree.

OutriderError
├── ConfigError            a setting is wrong; names the variable and the choices
├── InvalidRequest         the caller's fault; names the field           400  INVALID_ARGUMENT
│   ├── UnknownModel                                                    404  NOT_FOUND
│   ├── PayloadTooLarge                                                 413  INVALID_ARGUMENT
│   └── ExactModeRefused   the model's rows are not invariant            400  FAILED_PRECONDITION
├── UnknownSession         no such session, or it has ended              404  NOT_FOUND
├── Overloaded             try again later                               429  RESOURCE_EXHAUSTED
├── Unavailable            a part that is needed is not there            503  UNAVAILABLE
│   ├── VerifierLost       the stream to the verifier broke
│   └── DrafterLost        the stream to the drafter broke
├── CommitRefused          the commit log said no (gap, repeat, old epoch)  409  ABORTED
└── InternalError          a bug of ours, with a reference to the log     500  INTERNAL
"""

from __future__ import annotations


class OutriderError(Exception):
    """Base of all; `http_status` and `grpc_code` say how the two doors report it."""

    http_status = 500
    grpc_code = "INTERNAL"
    openai_type = "internal_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class ConfigError(OutriderError):
    """A setting is missing or wrong."""


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


class Unavailable(OutriderError):
    """A part that the request needs is not there now."""

    http_status = 503
    grpc_code = "UNAVAILABLE"
    openai_type = "service_unavailable_error"


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
