"""One choice of a chat as OpenAI's message, or as its deltas: content, reasoning and tool calls.

Not here: what stands around it (openai/answer_body.py, openai/answer_stream.py).
"""

from __future__ import annotations

import hashlib
from typing import Any

from outrider.gateway.tool_calls.events import Call, CallBegins, Event, fold
from outrider.gateway.tool_calls.formats import NONE
from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.shared.messages import FinishReason

# hexadecimal digits of a call's id; OpenAI's have 24 characters behind "call_"
_ID_DIGITS = 24
# Mistral's templates refuse ids of any other length.
MISTRAL_ID_CHARS = 9


def call_id(plan: OutputPlan, key: str, call: Call | CallBegins) -> str:
    """Returns the model's own id, or one that depends on the request alone, so that any gateway that continues it
    returns the same. key: names the choice, the same at every gateway.
    """
    if call.model_id:
        return call.model_id
    digest = hashlib.sha256(f"{key} {call.index}".encode()).hexdigest()
    return digest[:MISTRAL_ID_CHARS] if plan.tool_call_parser.startswith("mistral") else f"call_{digest[:_ID_DIGITS]}"


class ChatParts:
    """The parts of a chat choice. Feed it the choice's text in order, the last with the finish reason."""

    def __init__(self, plan: OutputPlan, answer_id: str, created: int, choice_index: int) -> None:
        self._plan = plan
        self._parser = plan.parser()
        self._key = f"{answer_id} {created} {choice_index}"
        self.has_calls = False

    def _events(self, text: str, finish: FinishReason | None) -> list[Event]:
        events = self._parser.push(text)
        if finish is not None:
            events += self._parser.finish(was_cut=finish is not FinishReason.STOP)
        self.has_calls = self.has_calls or any(isinstance(event, CallBegins) for event in events)
        return events

    def delta(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """Returns the delta that the text adds; at most one entry per call. A call's id, type and name come once."""
        events = self._events(text, finish)
        folded = fold(events)
        begun = {event.index for event in events if isinstance(event, CallBegins)}
        delta: dict[str, Any] = {}
        if folded.reasoning and self._plan.include_reasoning:
            delta[self._plan.reasoning_field] = folded.reasoning
        if folded.content:
            delta["content"] = folded.content
        if folded.calls:
            delta["tool_calls"] = [
                {"index": call.index, **self._whole_call(call)}
                if call.index in begun
                else {"index": call.index, "function": {"arguments": call.arguments}}
                for call in folded.calls
            ]
        return delta

    def message(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """Returns the message of a whole choice. Its content is null if there are only calls or reasoning; a reasoning
        model's reasoning is null if there is none to show.
        """
        folded = fold(self._events(text, finish or FinishReason.ABORT))
        message: dict[str, Any] = {"role": "assistant", "content": folded.content}
        if self._plan.reasoning_parser != NONE:
            message[self._plan.reasoning_field] = (folded.reasoning if self._plan.include_reasoning else "") or None
        if folded.calls:
            message["tool_calls"] = [self._whole_call(call) for call in folded.calls]
        if not folded.content and (folded.calls or folded.reasoning):
            message["content"] = None
        return message

    def _whole_call(self, call: Call) -> dict[str, Any]:
        function = {"name": call.name, "arguments": call.arguments}
        return {"id": call_id(self._plan, self._key, call), "type": "function", "function": function}

    def finish_reason(self, reason: str | None, stop_reason: str | int | None) -> str | None:
        """ "tool_calls" if the model itself ended after a call, unless the request named the tool (as OpenAI)."""
        ended = reason == "stop" and not isinstance(stop_reason, str)
        return "tool_calls" if ended and self.has_calls and not self._plan.is_named else reason
