"""Errors in Anthropic's form, on the routes of its Messages."""

from __future__ import annotations

from typing_extensions import TypedDict

_PATH = "/v1/messages"
# HTTP status to error type, as in Anthropic's documentation.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class MessagesErrorDetail(TypedDict):
    type: str
    message: str


class MessagesErrorAnswer(TypedDict):
    type: str
    error: MessagesErrorDetail


def is_messages_path(path: str) -> bool:
    return path == _PATH or path.startswith(f"{_PATH}/")


def messages_error(status: int, message: str) -> MessagesErrorAnswer:
    return {"type": "error", "error": {"type": _TYPES.get(status, _default(status)), "message": message}}


def _default(status: int) -> str:
    return "invalid_request_error" if status < 500 else "api_error"
