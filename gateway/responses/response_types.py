"""The JSON of a response as types, for the type checker and the OpenAPI document."""

from __future__ import annotations

from typing import Any, NotRequired

from typing_extensions import TypedDict

from outrider.gateway.openai.answer_types import CompletionTokensDetails, Metrics, ReceiptBody


class InputTokensDetails(TypedDict):
    """cache_write_tokens: always 0; clients require it."""

    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: CompletionTokensDetails
    total_tokens: int


class ResponseError(TypedDict):
    code: str
    message: str


class IncompleteDetails(TypedDict):
    reason: str


class ItemList(TypedDict):
    object: str
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(TypedDict):
    id: str
    object: str
    deleted: bool


class ResponseBody(TypedDict):
    """A response's body, which also has the request's fields that OpenAI repeats."""

    id: str
    object: str
    created_at: int
    status: str
    model: str
    output: list[dict[str, Any]]
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    background: NotRequired[bool]
    usage: ResponseUsage | None
    metrics: NotRequired[Metrics]
    receipt: NotRequired[ReceiptBody]
