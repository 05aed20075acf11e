"""The JSON of answers as types: `answer_body` is type-checked against them, and the OpenAPI document shows them.

Plain dictionaries at run time: the hot path of a stream is one json.dumps of a small dict.
"""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict


class ErrorDetail(TypedDict):
    message: str
    type: str
    param: str | None
    code: int


class ErrorAnswer(TypedDict):
    error: ErrorDetail


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionTokensDetails(TypedDict):
    """The last two: of the request's prediction, tokens that the output has, and all others."""

    reasoning_tokens: int
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: NotRequired[PromptTokensDetails]
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class SpeculationMetrics(TypedDict):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int
    saved_ms: float
    per_step_accepted: NotRequired[list[int]]
    per_step_drafted: NotRequired[list[int]]


class Metrics(TypedDict):
    speculative_decoding: SpeculationMetrics


class RoundAnnotation(TypedDict):
    """One round: tokens from output index `base_len` on; with a draft, also its method and drafter."""

    index: int
    base_len: int
    num_tokens: int
    num_draft_tokens: int
    num_accepted_tokens: int
    method: str
    drafter: str


class Annotation(TypedDict):
    """One entry per token: its origin ("target", "accepted", "corrected" or "bonus"), its id, the text it completed.

    rounds: the rounds of the tokens; one that began in an earlier event is repeated with the rest of its tokens.
    """

    origins: list[str]
    token_ids: list[int]
    token_texts: list[str]
    rounds: list[RoundAnnotation]


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TopLogprob(TypedDict):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    content: list[ChatTokenLogprob]


class PromptTokenLogprob(TypedDict):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptTokenLogprob] | None]


class _Choice(TypedDict):
    index: int
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: NotRequired[list[int] | None]
    outrider: NotRequired[Annotation]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class CalledFunction(TypedDict):
    """arguments: JSON as the model wrote it, so it may be broken."""

    name: NotRequired[str]
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: str
    function: CalledFunction


class ToolCallDelta(TypedDict):
    """id, type and name come with a call's first delta alone."""

    index: int
    id: NotRequired[str]
    type: NotRequired[str]
    function: CalledFunction


class ChatMessage(TypedDict):
    """reasoning_content: in place of reasoning, where the gateway is set so."""

    role: str
    content: str | None
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(_Choice):
    message: ChatMessage
    logprobs: ChatLogprobs | None


class ChatDelta(TypedDict):
    role: NotRequired[str]
    content: NotRequired[str]
    reasoning: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallDelta]]


class ChatChunkChoice(_Choice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class _Answer(TypedDict):
    id: str
    object: str
    created: int
    model: str
    system_fingerprint: NotRequired[str]


class ReceiptBody(TypedDict):
    """What `outrider verify` needs, with the answer's choices, to draw every token again (receipt.py).

    tokenizer: the digest of its tokens; "" is not said. key_id, signature: of the server's key, if it has one
    (receipt_signature.py).
    """

    version: int
    numerics: str | None
    tokenizer: str
    token_ids: list[list[int]]
    request: str
    key_id: NotRequired[str]
    signature: NotRequired[str]


class Completion(_Answer):
    choices: list[CompletionChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]
    receipt: NotRequired[ReceiptBody]


class ChatCompletion(_Answer):
    choices: list[ChatChoice]
    receipt: NotRequired[ReceiptBody]
    usage: Usage
    metrics: NotRequired[Metrics]
    prompt_token_ids: NotRequired[list[int] | None]
    prompt_logprobs: NotRequired[PromptLogprobs | None]


class ChatCompletionChunk(_Answer):
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[Metrics]
    receipt: NotRequired[ReceiptBody]
    prompt_token_ids: NotRequired[list[int]]


class ModelCard(TypedDict):
    id: str
    object: str
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int
    draft_methods: list[str]
    chats: bool
    tool_call_parser: str


class ModelList(TypedDict):
    object: str
    data: list[ModelCard]


class TokenizeAnswer(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeAnswer(TypedDict):
    prompt: str


class VerifiedReceipt(TypedDict):
    """said: as `outrider verify` says it; of an answer that is not confirmed, the first thing that differs."""

    confirmed: bool
    num_tokens: int
    said: str


class ReadyAnswer(TypedDict):
    ready: bool
    reason: NotRequired[str]
    warning: NotRequired[str]


class VersionAnswer(TypedDict):
    version: str


class LoadAnswer(TypedDict):
    server_load: int
