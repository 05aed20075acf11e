"""The answer of a request in the form of the API that it came by: whole, or as server-sent events."""

from __future__ import annotations

from outrider.gateway.anthropic.message_answer import MessageStream, WholeMessage
from outrider.gateway.openai.answer_body import WholeAnswer
from outrider.gateway.openai.answer_stream import AnswerStream
from outrider.gateway.openai.usage import AnswerSettings
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.event_cursor import NOTHING_SEEN, EventCursor
from outrider.gateway.responses.response_stream import ResponseStream, WholeResponse


def whole_answer(prepared: Prepared, settings: AnswerSettings) -> WholeAnswer | WholeMessage | WholeResponse:
    if prepared.options.message:
        return WholeMessage(prepared, settings.receipt_key)
    make = WholeResponse if prepared.options.response else WholeAnswer
    return make(prepared, settings)


def answer_stream(
    prepared: Prepared, settings: AnswerSettings, seen: EventCursor = NOTHING_SEEN
) -> AnswerStream | MessageStream | ResponseStream:
    if prepared.options.message:
        return MessageStream(prepared, seen, settings.receipt_key)
    make = ResponseStream if prepared.options.response else AnswerStream
    return make(prepared, settings, seen)
