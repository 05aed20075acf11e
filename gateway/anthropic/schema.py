"""The bodies of /v1/messages and /v1/messages/count_tokens. As in openai/schema.py, null means "not given", and a known
but unsupported field is refused by name if its value has an effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from outrider.gateway.anthropic.conversation import ChatMessages, ContextEdits, SystemText
from outrider.gateway.anthropic.tools import ChoiceField, Functions
from outrider.gateway.openai.fields import Bool, Int, JsonObject, Number, String, Strings
from outrider.gateway.openai.schema import Body, Speculation


class Thinking(Body):
    type: String = Field(description="enabled, adaptive or disabled")
    budget_tokens: Int | None = Field(
        None, description="tokens of thinking; what thinks in plain text is bounded by max_tokens alone"
    )
    display: String | None = Field(None, description='"omitted": the thinking is computed and counted, but not sent')


class OutputConfig(Body):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"task_budget": ()}

    effort: String | None = Field(None, description="the chat template's variable reasoning_effort")
    format: JsonObject | None = Field(None, description='{"type": "json_schema", "schema": {...}}')


class ContextManagement(Body):
    edits: ContextEdits = ()


class CountTokensRequest(Body):
    """The parts of a request that make up its prompt."""

    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "output_format": (),
    }
    instead: ClassVar[Mapping[str, str]] = {"output_format": "output_config.format"}

    model: String | None = None
    messages: ChatMessages
    system: SystemText | None = None
    tools: Functions = ()
    tool_choice: ChoiceField | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None


class MessagesRequest(CountTokensRequest):
    unsupported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **CountTokensRequest.unsupported,
        "compaction": (),
        "thread": (),
    }

    max_tokens: Int
    stop_sequences: Strings = ()
    stream: Bool = False
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: Int | None = None
    seed: Int | None = Field(None, description="Outrider's own, as in /v1/chat/completions")
    request_id: String | None = Field(None, description="Outrider's own: part of the answer's id")
    speculation: Speculation | None = None
    receipt: Bool = Field(
        False, description="Outrider's own, as in /v1/chat/completions; a stream's message_delta has it"
    )
