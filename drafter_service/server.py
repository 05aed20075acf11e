"""The drafter's gRPC server: parse, call the engine, format. One stream is one session, or one engine (batch.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.drafter_service.batch import Answers, BatchStream
from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.tenants import Engine, Tenant, Tenants
from outrider.drafting.session import OnReply
from outrider.shared import rpc, wire
from outrider.shared.errors import InvalidRequest, OutriderError
from outrider.shared.messages import DrafterInfo, DraftMethodInfo, ProposalReply
from outrider.shared.rpc_session import SessionHandlers, loaded_draft, session_stream
from outrider.shared.tracing import Attributes
from outrider.v1 import common_pb2 as common_pb
from outrider.v1 import drafter_pb2 as pb
from outrider.v1 import drafter_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from outrider.shared.tracing.otlp import Tracer


class DrafterServicer(pb_grpc.DrafterServicer):
    def __init__(
        self,
        engine: DrafterEngine,
        describe: Callable[[], DrafterInfo],
        tracer: Tracer | None = None,
        tenants: Tenants | None = None,
        load_draft: Callable[[str], DraftMethodInfo] | None = None,
    ) -> None:
        """load_draft: see drafting.serving.loading.DraftLoader; None: it is not allowed."""
        self._load_draft = load_draft
        self._engine = engine
        self._describe = describe
        self._tracer = tracer
        self._tenants = tenants or Tenants()
        self._connected: list[Engine] = []

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.DrafterReply]:
        tenant = await self._identify(context)
        handlers = SessionHandlers[pb.DrafterRequest, ProposalReply, pb.DrafterReply](
            open=partial(self._open, tenant),
            step=self._step,
            close=partial(self._close, tenant),
            format=wire.proposal_reply_to_wire,
        )
        if self._tracer is not None:
            handlers = self._tracer.session("draft", handlers, context, _span_attributes)
        # gRPC checks whether the method itself is an async generator, so it cannot just return one.
        async for reply in session_stream(request_iterator, context, handlers):
            yield reply

    async def Batch(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.DraftBatchReply]:
        tenant = await self._identify(context)
        stream = BatchStream(self._engine, self._describe(), self._tenants, tenant, self._connected)
        handlers = SessionHandlers[pb.DraftBatchRequest, Answers, pb.DraftBatchReply](
            open=stream.open, step=stream.step, close=stream.close, format=stream.format
        )
        async for reply in session_stream(request_iterator, context, handlers):
            yield reply

    async def GetInfo(self, request: pb.GetDrafterInfoRequest, context: Any) -> pb.DrafterInfo:
        await self._identify(context)
        return wire.drafter_info_to_wire(self._describe())

    async def LoadDraft(self, request: common_pb.LoadDraftRequest, context: Any) -> common_pb.DraftMethodInfo:
        await self._identify(context)
        info = await loaded_draft(self._load_draft, request.path, context)
        return wire.to_message(common_pb.DraftMethodInfo(), info)

    async def _identify(self, context: Any) -> Tenant:
        try:
            return self._tenants.identify(context)
        except OutriderError as error:
            await rpc.abort(context, error)

    async def _open(self, tenant: Tenant, request: pb.DrafterRequest, on_reply: OnReply) -> int:
        if request.WhichOneof("request") != "open":
            raise InvalidRequest("the first message of a session must be `open`", param="open")
        spec = wire.spec_from_wire(request.open)
        grammar = None
        if spec.sampling_params.grammar is not None:
            # Compiling can take seconds; the other sessions' streams continue meanwhile.
            grammar = await asyncio.to_thread(self._engine.compile_grammar, spec)
        if tenant.has_key:
            spec = replace(spec, cache_salt=f"{tenant.name}\0{spec.cache_salt}")
        self._tenants.take(tenant)
        try:
            return self._engine.open(spec, on_reply, grammar)
        except OutriderError:
            self._tenants.give_back(tenant)
            raise

    def _close(self, tenant: Tenant, handle: int) -> None:
        self._tenants.give_back(tenant)
        self._engine.close(handle)

    def _step(self, handle: int, request: pb.DrafterRequest) -> None:
        if request.WhichOneof("request") != "step":
            raise InvalidRequest("after `open`, a session accepts only `step`", param="request")
        self._engine.submit(handle, wire.draft_step_from_wire(request.step))


def _span_attributes(reply: ProposalReply) -> Attributes:
    return {
        "outrider.epoch": reply.epoch,
        "outrider.base_len": reply.proposal.base_len,
        "outrider.method": reply.proposal.method,
        "outrider.num_draft_tokens": len(reply.proposal.token_ids),
        "outrider.batch_sessions": reply.timings.batch_sessions,
        "outrider.queue_us": reply.timings.queue_us,
        "outrider.forward_us": reply.timings.forward_us,
    }
