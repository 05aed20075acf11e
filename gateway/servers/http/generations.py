"""The routes that generate, in the forms of all APIs: new requests, or the rest after the last event that a client saw.

Not here: what a body means (openai/convert.py and its kin), sending answers (http_answer.py), responses that
were stored before (stored_responses.py).
"""

from __future__ import annotations

from dataclasses import replace

from starlette.requests import Request
from starlette.responses import Response

from outrider.gateway.admission.auth import caller_of
from outrider.gateway.admission.quotas import metered
from outrider.gateway.anthropic.convert import prepare_message
from outrider.gateway.anthropic.schema import MessagesRequest
from outrider.gateway.openai.chat_batch import prepare_chat_batch
from outrider.gateway.openai.convert import prepare_chat, prepare_completion
from outrider.gateway.openai.schema import ChatCompletionRequest, CompletionRequest, parse_body
from outrider.gateway.request.answers import AnswerKind, Prepared, Wanted
from outrider.gateway.request.event_cursor import LAST_EVENT_ID, NOTHING_SEEN, EventCursor, parse_event_id
from outrider.gateway.responses.as_chat import prepare_response
from outrider.gateway.responses.input_items import refers
from outrider.gateway.responses.schema import ResponsesRequest
from outrider.gateway.servers.http.body_work import BodyWork
from outrider.gateway.servers.http.http_answer import HttpAnswer, Load
from outrider.gateway.servers.http.stored_responses import StoredResponses, events_seen
from outrider.gateway.servers.service import GatewayService
from outrider.shared.errors import InvalidRequest
from outrider.shared.tracing import carrier_of


class Generations:
    def __init__(self, service: GatewayService, work: BodyWork, stored: StoredResponses, load: Load) -> None:
        self._service = service
        self._work = work
        self._stored = stored
        self._load = load

    async def completions(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.COMPLETION):
            return resumed
        served = self._service.served
        prepared = await self._work.parsed(
            request, lambda body: prepare_completion(parse_body(CompletionRequest, body), served)
        )
        return self._begun(request, AnswerKind.COMPLETION, prepared)

    async def chat_completions(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.CHAT):
            return resumed
        served = self._service.served
        prepared = await self._work.parsed(
            request, lambda body: prepare_chat(parse_body(ChatCompletionRequest, body), served)
        )
        return self._begun(request, AnswerKind.CHAT, prepared)

    async def chat_batch(self, request: Request) -> Response:
        served = self._service.served
        prepared = await self._work.parsed(request, lambda body: prepare_chat_batch(body, served))
        return self._begun(request, AnswerKind.CHAT, prepared)

    async def invocations(self, request: Request) -> Response:
        """SageMaker's one route: the body decides which API answers."""
        served = self._service.served

        def prepared(body: object) -> Prepared:
            if isinstance(body, dict) and "messages" in body:
                return prepare_chat(parse_body(ChatCompletionRequest, body), served)
            return prepare_completion(parse_body(CompletionRequest, body), served)

        answer = await self._work.parsed(request, prepared)
        return self._begun(request, AnswerKind.CHAT if answer.options.chat else AnswerKind.COMPLETION, answer)

    async def responses(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.RESPONSE):
            return resumed
        served, can_store = self._service.served, self._service.response_store is not None

        def prepared_or_body(body: object) -> Prepared | ResponsesRequest:
            parsed = parse_body(ResponsesRequest, body)
            follows = parsed.previous_response_id is not None or refers(parsed.input)
            return parsed if follows else prepare_response(parsed, served, can_store=can_store)

        prepared = await self._work.parsed(request, prepared_or_body)
        if isinstance(prepared, ResponsesRequest):
            prepared = await self._stored.following(request, prepared, served)
        if prepared.in_background:
            return await self._stored.begun(request, self._begin(request, AnswerKind.RESPONSE, prepared))
        return self._begun(request, AnswerKind.RESPONSE, prepared)

    async def response(self, request: Request) -> Response:
        """Stored or running; with ?stream=true its events."""
        seen = events_seen(request.query_params)
        if seen is None:
            return await self._stored.response(request)
        return await self._rest_of(request, request.path_params["response_id"], seen, AnswerKind.RESPONSE)

    async def messages(self, request: Request) -> Response:
        if resumed := await self._resumed(request, AnswerKind.MESSAGE):
            return resumed
        served = self._service.served
        prepared = await self._work.parsed(
            request, lambda body: prepare_message(parse_body(MessagesRequest, body), served)
        )
        return self._begun(request, AnswerKind.MESSAGE, prepared)

    async def stream(self, request: Request) -> Response:
        """The rest of an answer of any kind; without a last event, all of it."""
        request_id, last_event_id = request.path_params["request_id"], request.headers.get(LAST_EVENT_ID)
        if not last_event_id:
            return await self._rest_of(request, request_id, NOTHING_SEEN, None)
        named, seen = parse_event_id(last_event_id)
        if named != request_id:
            raise InvalidRequest(f"{LAST_EVENT_ID} does not belong to the request in the path", param=LAST_EVENT_ID)
        return await self._rest_of(request, request_id, seen, None)

    def _begin(self, request: Request, kind: AnswerKind, prepared: Prepared) -> Prepared:
        caller = caller_of(request)
        owned = prepared.owned_by(caller.owner, caller.name)
        return self._service.begin(kind, replace(owned, carrier=carrier_of(request.headers.items())))

    def _begun(self, request: Request, kind: AnswerKind, prepared: Prepared) -> Response:
        begun = self._begin(request, kind, prepared)
        return HttpAnswer(metered(self._service, caller_of(request).account), begun, self._load)

    async def _resumed(self, request: Request, kind: AnswerKind) -> Response | None:
        """Returns the rest of an earlier answer, if the client sends its last event's id; None for a new request."""
        last_event_id = request.headers.get(LAST_EVENT_ID)
        if not last_event_id:
            return None
        request_id, seen = parse_event_id(last_event_id)
        return await self._rest_of(request, request_id, seen, kind)

    async def _rest_of(self, request: Request, request_id: str, seen: EventCursor, kind: AnswerKind | None) -> Response:
        carrier = carrier_of(request.headers.items())
        caller = caller_of(request)
        wanted = Wanted(request_id, caller.owner, seen.by_choice(), kind, carrier=carrier, caller=caller.name)
        prepared = await self._service.resume(wanted)
        if prepared.in_background:
            return await self._stored.rest_of(request, prepared, seen)
        return HttpAnswer(metered(self._service, caller_of(request).account), prepared, self._load, seen=seen)
