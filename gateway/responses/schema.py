"""The body of /v1/responses, as OpenAI defines it, with Outrider's own fields of a chat.

Not here: the items of the input (input_items.py), and what the fields mean for a chat (as_chat.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field, WithJsonSchema

from outrider.gateway.openai.fields import Bool, Int, JsonObject, LogitBias, Number, String, Strings
from outrider.gateway.openai.schema import (
    UNSUPPORTED,
    Body,
    ChatCompletionRequest,
    Prediction,
    Speculation,
    StructuredOutputs,
)
from outrider.gateway.responses.input_items import InputItems

# Chat fields that have another name here.
_INSTEAD = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include with message.output_text.logprobs",
}
_UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    **UNSUPPORTED,
    "conversation": (),
    "enable_response_messages": (False,),
    "moderation": (),
    "previous_input_messages": (),
    "prompt": (),
}
# Chat fields that have no effect here at these values; any other chat field that a response lacks is refused.
_HARMLESS: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "logprobs": (False,),
    "logprob_token_ids": ([],),
    "include_reasoning": (True,),
    "skip_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "ignore_eos": (False,),
    "stop": ([],),
    "min_tokens": (0,),
}
# Fields that do not affect the output.
_IGNORED = {"stream_options", "truncation_side"}


class TextField(Body):
    """Its verbosity has no effect: no template knows one."""

    format: JsonObject | None = Field(None, description="text, json_object or json_schema")


class ReasoningField(Body):
    """A requested summary is not made: the reasoning itself is in the answer."""

    effort: String | None = Field(None, description="none, minimal, low, medium, high, xhigh or max")


class ResponsesRequest(Body):
    instead: ClassVar[Mapping[str, str]] = _INSTEAD

    model: String | None = None
    input: InputItems
    instructions: String | None = None
    store: Bool | None = Field(None, description="true unless the gateway stores no responses")
    background: Bool = Field(
        False, description="answers at once; GET /v1/responses/ID has the response when it is done"
    )
    previous_response_id: String | None = None
    tools: Annotated[Any, WithJsonSchema({"type": "array", "items": {"type": "object"}})] = ()
    tool_choice: Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})] = None
    parallel_tool_calls: Bool = True
    text: TextField | None = None
    reasoning: ReasoningField | None = None
    max_output_tokens: Int | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    top_logprobs: Int | None = None
    include: Strings = Field((), description="message.output_text.logprobs; others have nothing to add")
    truncation: String = Field("disabled", description="a conversation beyond the context is refused either way")
    metadata: JsonObject | None = None
    stream: Bool = False
    top_k: Int | None = Field(None, description="-1 and 0 keep everything")
    min_p: Number | None = None
    seed: Int | None = None
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    repetition_penalty: Number = 1.0
    logit_bias: LogitBias | None = None
    structured_outputs: StructuredOutputs | None = None
    chat_template_kwargs: JsonObject | None = None
    request_id: String | None = Field(None, description="part of the answer's id, by which a stream is resumed")
    cache_salt: String | None = None
    prediction: Prediction | None = None
    thinking_token_budget: Int | None = Field(
        None, description="tokens of reasoning, markers not counted; -1: no limit"
    )
    speculation: Speculation | None = None
    receipt: Bool = Field(False, description="as in /v1/chat/completions; a stream has it in its last event")


ResponsesRequest.unsupported = {
    **{
        name: _HARMLESS.get(name, ())
        for name in ChatCompletionRequest.model_fields.keys() - ResponsesRequest.model_fields.keys() - _IGNORED
    },
    **_UNSUPPORTED,
}
