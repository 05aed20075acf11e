"""The batch call: one stream has all sessions of an engine that steps its requests together.

A session that fails ends with an answer of its own; the stream and its other sessions go on.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.tenants import Engine, Tenant, Tenants
from outrider.shared import wire
from outrider.shared.errors import InvalidRequest, OutriderError, ReaderTooSlow, UnknownSession
from outrider.shared.messages import DrafterInfo, ProposalReply
from outrider.v1 import drafter_pb2 as pb

# items; one message: an engine opens and steps each session of its batch
_MAX_ITEMS = 4096
# messages; answers that an engine leaves unread before its stream is cut
_MAX_UNREAD = 1024
_stream_numbers = itertools.count()


@dataclass(eq=False)
class _Session:
    """number: the engine's. handle: the drafter's; None until it is open there."""

    number: int
    handle: int | None = None


Answers = list[tuple[_Session, ProposalReply | Exception]]


class BatchStream:
    """One engine's stream; its methods are the callbacks of shared.rpc_session.SessionHandlers, on the event loop.

    connected: the engines of all streams at this drafter.
    """

    def __init__(
        self, drafter: DrafterEngine, info: DrafterInfo, tenants: Tenants, tenant: Tenant, connected: list[Engine]
    ) -> None:
        self._drafter, self._info = drafter, info
        self._tenants, self._tenant = tenants, tenant
        self._connected = connected
        self._id = next(_stream_numbers)
        self._engine: Engine | None = None
        self._sessions: dict[int, _Session] = {}
        self._lock = threading.Lock()  # for what the drafter's thread writes
        self._answers: Answers = []
        self._num_unread = 0

    async def open(self, request: pb.DraftBatchRequest, on_reply: Callable[[Answers | Exception], None]) -> int:
        """Raises InvalidRequest for an engine whose token ids are not those that are drafted here."""
        if not request.HasField("engine"):
            raise InvalidRequest("the first message of a batch stream must have `engine`", param="engine")
        said = request.engine
        engine = Engine(said.model, said.tokenizer_digest, said.vocab_size, said.method)
        engine.require_same_tokens(self._info, self._connected)
        self._connected.append(engine)
        self._engine, self._on_reply = engine, on_reply
        on_reply([])  # the first reply, empty: the engine is taken
        try:
            self.step(0, request)
        except BaseException:
            self.close(0)
            raise
        return 0

    def step(self, _handle: int, request: pb.DraftBatchRequest) -> None:
        if len(request.items) > _MAX_ITEMS:
            raise InvalidRequest(f"{len(request.items)} items in a message; at most {_MAX_ITEMS}", param="items")
        for item in request.items:
            try:
                self._take(item)
            except OutriderError as error:
                self._end(item.session)
                self._answer(_Session(item.session), error)
        self._flush()

    def close(self, _handle: int) -> None:
        for number in list(self._sessions):
            self._end(number)
        if self._engine is not None:
            self._connected.remove(self._engine)

    def format(self, answers: Answers) -> pb.DraftBatchReply:
        if answers:
            with self._lock:
                self._num_unread -= 1
        reply = pb.DraftBatchReply()
        for session, result in answers:
            if self._sessions.get(session.number, session) is not session:
                continue  # closed and opened anew meanwhile
            if isinstance(result, ProposalReply):
                proposal = wire.proposal_reply_to_wire(result).proposal
                reply.answers.append(pb.DraftBatchAnswer(session=session.number, proposal=proposal))
            else:
                self._end(session.number)
                error = result.message if isinstance(result, OutriderError) else "internal error, see the drafter's log"
                reply.answers.append(pb.DraftBatchAnswer(session=session.number, error=error))
        return reply

    def _take(self, item: pb.DraftBatchItem) -> None:
        kind = item.WhichOneof("item")
        if kind == "open":
            self._open(item.session, item.open)
        elif kind == "close":
            self._end(item.session)
        elif kind == "step":
            session = self._sessions.get(item.session)
            if session is None or session.handle is None:
                raise UnknownSession(f"session {item.session} is not open")
            self._drafter.submit(session.handle, wire.draft_step_from_wire(item.step))

    def _open(self, number: int, message: pb.OpenDrafterSession) -> None:
        """The texts of an engine's sessions are kept apart from those of other tenants and models."""
        self._end(number)
        spec = wire.spec_from_wire(message)
        if self._engine is None or spec.method != self._engine.method:
            raise InvalidRequest("a session has another method than its engine's first message", param="method")
        if spec.sampling_params.grammar is not None:
            raise InvalidRequest("sessions of a batch have no grammar", param="grammar")
        spec = replace(
            spec,
            session_id=f"{self._tenant.name}/{self._id}/{number}",
            cache_salt="\0".join((self._tenant.name, self._engine.model, spec.cache_salt)),
        )
        self._tenants.take(self._tenant)
        session = self._sessions[number] = _Session(number)
        session.handle = self._drafter.open(spec, partial(self._answer, session), flush=self._flush)

    def _end(self, number: int) -> None:
        session = self._sessions.pop(number, None)
        if session is not None:
            self._tenants.give_back(self._tenant)
            if session.handle is not None:
                self._drafter.close(session.handle)

    # ---- on any thread ----

    def _answer(self, session: _Session, result: ProposalReply | Exception) -> None:
        with self._lock:
            self._answers.append((session, result))

    def _flush(self) -> None:
        """Sends what has been answered since the last call, in one message."""
        with self._lock:
            answers, self._answers = self._answers, []
            self._num_unread += bool(answers)
            is_unread = self._num_unread > _MAX_UNREAD
        if is_unread:
            self._on_reply(ReaderTooSlow(f"{_MAX_UNREAD} messages of answers were left unread"))
        elif answers:
            self._on_reply(answers)
