"""The gRPC door of the verifier: parse, call the engine, format. One stream is one session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider.v1 import verifier_pb2 as pb
from outrider.v1 import verifier_pb2_grpc as pb_grpc
from shared import wire
from shared.errors import InvalidRequest
from shared.messages import Commit, VerifierInfo
from shared.rpc_session import SessionHandlers, session_stream
from verifier_service.engine import VerifierEngine
from verifier_service.session import OnReply


class VerifierServicer(pb_grpc.VerifierServicer):
    def __init__(self, engine: VerifierEngine, describe: Callable[[], VerifierInfo]) -> None:
        self._engine = engine
        self._describe = describe
        self._handlers = SessionHandlers[pb.VerifierRequest, Commit, pb.VerifierReply](
            open=self._open,
            step=self._step,
            close=engine.close,
            format=lambda commit: pb.VerifierReply(commit=wire.commit_to_wire(commit)),
        )

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.VerifierReply]:
        # gRPC looks whether the method itself is an async generator, so it cannot just return one.
        async for reply in session_stream(request_iterator, context, self._handlers):
            yield reply

    async def GetInfo(self, request: pb.GetVerifierInfoRequest, context: Any) -> pb.VerifierInfo:
        return wire.verifier_info_to_wire(self._describe())

    async def _open(self, request: pb.VerifierRequest, on_reply: OnReply) -> int:
        if request.WhichOneof("request") != "open":
            raise InvalidRequest("the first message of a session must be `open`", param="open")
        spec = wire.spec_from_wire(request.open)
        grammar = None
        if spec.sampling_params.grammar is not None:
            # Compiling can take seconds; the other sessions' streams go on meanwhile.
            grammar = await asyncio.to_thread(self._engine.compile_grammar, spec)
        return self._engine.open(spec, on_reply, grammar)

    def _step(self, handle: int, request: pb.VerifierRequest) -> None:
        if request.WhichOneof("request") != "step":
            raise InvalidRequest("a session takes one `open`, then only `step`", param="request")
        self._engine.submit(handle, wire.verify_step_from_wire(request.step))
