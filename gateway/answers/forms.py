"""The answer of a request in the form of the API that it came by: whole, or as server-sent events."""

from __future__ import annotations

from outrider.gateway.anthropic.message_answer import MessageStream, WholeMessage
from outrider.gateway.openai.answer_body import WholeAnswer
from outrider.gateway.openai.answer_stream import AnswerStream
from outrider.gateway.openai.receipt_signature import ReceiptKey
from outrider.gateway.openai.usage import SpecMetricsLevel
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.event_cursor import NOTHING_SEEN, EventCursor
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.responses.response_stream import ResponseStream, WholeResponse


def whole_answer(
    prepared: Prepared,
    tokenizer: Tokenizer,
    level: SpecMetricsLevel = SpecMetricsLevel.NONE,
    version: str = "",
    receipt_key: ReceiptKey | None = None,
) -> WholeAnswer | WholeMessage | WholeResponse:
    if prepared.options.message:
        return WholeMessage(prepared, receipt_key)
    make = WholeResponse if prepared.options.response else WholeAnswer
    return make(prepared, tokenizer, level, version, receipt_key)


def answer_stream(
    prepared: Prepared,
    tokenizer: Tokenizer,
    level: SpecMetricsLevel = SpecMetricsLevel.NONE,
    version: str = "",
    seen: EventCursor = NOTHING_SEEN,
    receipt_key: ReceiptKey | None = None,
) -> AnswerStream | MessageStream | ResponseStream:
    if prepared.options.message:
        return MessageStream(prepared, seen, receipt_key)
    make = ResponseStream if prepared.options.response else AnswerStream
    return make(prepared, tokenizer, level, version, seen, receipt_key)
