"""The routes of /v1/responses that need a response stored before: to continue it, to read, cancel or delete it.

Not here: what is stored and how (responses/stored.py, responses/store.py), new responses (generations.py), the work on
one in the background (background.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from outrider.gateway.admission.auth import caller_of, owner_of
from outrider.gateway.admission.body_budget import BodyBudget, Held
from outrider.gateway.admission.quotas import metered
from outrider.gateway.request.answers import AnswerKind, Prepared, Wanted
from outrider.gateway.request.event_cursor import NOTHING_SEEN, EventCursor, Seen
from outrider.gateway.request.served import Served
from outrider.gateway.responses.as_chat import prepare_response
from outrider.gateway.responses.response_types import DeletedResponse
from outrider.gateway.responses.schema import ResponsesRequest
from outrider.gateway.responses.store import ResponseStore
from outrider.gateway.responses.stored import (
    cancel,
    delete,
    dereferenced,
    end,
    input_page,
    is_running,
    stored_items,
    stored_response,
)
from outrider.gateway.servers.http.background import BackgroundAnswer
from outrider.gateway.servers.http.http_answer import HttpAnswer, Load
from outrider.gateway.servers.http.long_json import LongJson
from outrider.gateway.servers.service import GatewayService
from outrider.shared.errors import CommitRefused, InvalidRequest, UnknownSession

_PREVIOUS = "previous_response_id"
_MAX_NUMBER_DIGITS = 10


class StoredResponses:
    """Endpoints, of one application."""

    def __init__(self, service: GatewayService, bodies: BodyBudget, load: Load) -> None:
        self._service = service
        self._bodies = bodies
        self._load = load

    async def following(self, request: Request, body: ResponsesRequest, served: Served) -> Prepared:
        """Prepares a request that begins with a stored conversation or refers to stored items. It counts as a body of
        the length of all of them.
        """
        store, owner = self._service.response_store, owner_of(request)
        if store is None:
            param = "input" if body.previous_response_id is None else _PREVIOUS
            raise InvalidRequest(
                f"{param}: this gateway stores no responses; start it with --stored-response-ttl-s, or send the "
                "conversation as input",
                param=param,
            )
        document = b""
        if body.previous_response_id is not None:
            document = await self._previous(store, owner, body.previous_response_id)
        try:
            items = await dereferenced(store, owner, body.input, self._service.limits.max_body_bytes)
        except ValueError as error:
            raise InvalidRequest(f"input: {error}", param="input") from None
        body = body.model_copy(update={"input": tuple(items)})
        num_bytes = len(document) + self._body_bytes(request)
        with closing(caller_of(request).held or Held(self._bodies)) as held:
            held.add_body(num_bytes)
            return await self._bodies.on_thread(
                lambda: prepare_response(body, served, stored_items(document) if document else (), can_store=True),
                num_bytes,
            )

    async def _previous(self, store: ResponseStore, owner: str, previous: str) -> bytes:
        try:
            document = await store.get(owner, previous)
        except UnknownSession as error:
            raise UnknownSession(f"{_PREVIOUS}: {error.message}", param=_PREVIOUS) from None
        if is_running(document):
            raise InvalidRequest(f"{_PREVIOUS}: response {previous[:200]!r} is still in progress", param=_PREVIOUS)
        return document

    def _body_bytes(self, request: Request) -> int:
        """Returns the body's size in bytes; the server's limit if the client has not sent one."""
        length = request.headers.get("content-length", "")
        return int(length) if length.isdigit() else self._service.limits.max_body_bytes

    async def response(self, request: Request) -> Response:
        """Returns a stored response; continues a running one that no gateway works on any more."""
        owner, response_id = owner_of(request), request.path_params["response_id"]
        document = await self._document(request)
        answer = self._answer(request, stored_response(document))
        if not is_running(document) or not await self._store(response_id).take_over(owner, response_id):
            return answer
        try:
            wanted = Wanted(response_id, owner, {}, AnswerKind.RESPONSE, caller=caller_of(request).name)
            prepared = await self._service.resume(wanted)
        except (UnknownSession, CommitRefused) as error:
            lost = {"code": "server_error", "message": f"its gateway was lost, and its log too: {error.message}"}
            changes = {"status": "failed", "error": lost}
            return self._answer(request, await end(self._store(response_id), owner, document, changes))
        return BackgroundAnswer(self._metered(request), prepared, self._load, answer=answer)

    async def begun(self, request: Request, prepared: Prepared) -> Response:
        """Begins a response in the background."""
        response = BackgroundAnswer(self._metered(request), prepared, self._load)
        await response.begin()
        return response

    async def rest_of(self, request: Request, prepared: Prepared, seen: EventCursor) -> Response:
        """Returns the rest of a stream that was begun in the background. Raises UnknownSession or CommitRefused."""
        response_id = prepared.options.answer_id
        document = await self._store(response_id).get(owner_of(request), response_id)
        status = stored_response(document)["status"]
        if status in ("cancelled", "failed"):
            raise CommitRefused(f"response {response_id!r} is {status}: its stream does not go on")
        kind = BackgroundAnswer if is_running(document) else HttpAnswer
        return kind(self._metered(request), prepared, self._load, seen=seen)

    async def cancel(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        return self._answer(request, await cancel(self._store(response_id), owner_of(request), response_id))

    async def input_items(self, request: Request) -> Response:
        return self._answer(request, input_page(await self._document(request), request.query_params))

    async def delete(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        await delete(self._store(response_id), owner_of(request), response_id)
        deleted: DeletedResponse = {"id": response_id, "object": "response", "deleted": True}
        return JSONResponse(deleted)

    def _metered(self, request: Request) -> GatewayService:
        return metered(self._service, caller_of(request).account)

    async def _document(self, request: Request) -> bytes:
        response_id = request.path_params["response_id"]
        return await self._store(response_id).get(owner_of(request), response_id)

    def _store(self, response_id: str) -> ResponseStore:
        if self._service.response_store is None:
            raise UnknownSession(f"no response {response_id[:200]!r}: this gateway stores none")
        return self._service.response_store

    def _answer(self, request: Request, answer: Mapping[str, object]) -> Response:
        """Returns the answer as JSON; a long one counts against the caller's memory until it is sent."""
        response = LongJson(answer)
        if (held := caller_of(request).held) is not None:
            held.add_answer(len(response.body))
        return response


def events_seen(query: Mapping[str, str]) -> EventCursor | None:
    """Returns the position after which ?stream=true&starting_after=N continues; None: the query is for the response,
    not its events. Raises InvalidRequest.
    """
    if query.get("stream", "false").lower() in ("false", "0"):
        return None
    after = query.get("starting_after")
    if after is None:
        return NOTHING_SEEN
    if not (after.isascii() and after.isdigit() and len(after) <= _MAX_NUMBER_DIGITS):
        raise InvalidRequest("starting_after must be the sequence_number of an event", param="starting_after")
    return EventCursor((Seen(event=int(after)),))
