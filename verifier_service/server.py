"""The verifier's gRPC server: parse, call the engine, format. One stream is one session."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

from outrider.shared import rpc, wire
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import Commit, DraftMethodInfo, VerifierInfo
from outrider.shared.rpc_session import SessionHandlers, loaded_draft, session_stream
from outrider.shared.tracing import Attributes
from outrider.v1 import common_pb2 as common_pb
from outrider.v1 import verifier_pb2 as pb
from outrider.v1 import verifier_pb2_grpc as pb_grpc
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.reload.served_target import ServedTarget, TargetState
from outrider.verifier_service.session import OnReply

if TYPE_CHECKING:
    from outrider.shared.tracing.otlp import Tracer


class VerifierServicer(pb_grpc.VerifierServicer):
    def __init__(
        self,
        engine: VerifierEngine,
        describe: Callable[[], VerifierInfo],
        tracer: Tracer | None = None,
        load_draft: Callable[[str], DraftMethodInfo] | None = None,
        served: ServedTarget | None = None,
        load_target: Callable[[str, float], TargetState] | None = None,
    ) -> None:
        """load_draft, load_target: see drafting.serving.loading.DraftLoader and reload.reloader.TargetReloader; None:
        it is not allowed. served: None for a target of the kind that `describe` says.
        """
        self._engine = engine
        self._load_draft = load_draft
        self._load_target = load_target
        self._served = served
        self._describe = describe
        self._tracer = tracer
        self._handlers = SessionHandlers[pb.VerifierRequest, Commit, pb.VerifierReply](
            open=self._open,
            step=self._step,
            close=engine.close,
            format=lambda commit: pb.VerifierReply(commit=wire.commit_to_wire(commit)),
        )

    async def Session(self, request_iterator: AsyncIterator[Any], context: Any) -> AsyncIterator[pb.VerifierReply]:
        handlers = self._handlers
        if self._tracer is not None:
            handlers = self._tracer.session("verify", handlers, context, _span_attributes)
        # gRPC checks whether the method itself is an async generator, so it cannot just return one.
        async for reply in session_stream(request_iterator, context, handlers):
            yield reply

    async def GetInfo(self, request: pb.GetVerifierInfoRequest, context: Any) -> pb.VerifierInfo:
        return wire.verifier_info_to_wire(self._describe())

    async def LoadDraft(self, request: common_pb.LoadDraftRequest, context: Any) -> common_pb.DraftMethodInfo:
        info = await loaded_draft(self._load_draft, request.path, context)
        return wire.to_message(common_pb.DraftMethodInfo(), info)

    async def LoadTarget(self, request: pb.LoadTargetRequest, context: Any) -> pb.LoadTargetReply:
        try:
            if self._load_target is None:
                raise InvalidRequest("start the verifier with --allow-target-reload to replace its weights")
            state = await asyncio.to_thread(self._load_target, request.path, request.drain_s)
        except Exception as error:
            await rpc.abort(context, error)
        return pb.LoadTargetReply(numerics=state.numerics, target_version=state.version)

    async def _open(self, request: pb.VerifierRequest, on_reply: OnReply) -> int:
        if request.WhichOneof("request") != "open":
            raise InvalidRequest("the first message of a session must be `open`", param="open")
        spec = wire.spec_from_wire(request.open)
        served = self._served or ServedTarget(self._describe().numerics)
        version = await served.admit(spec.numerics, continues=bool(spec.committed_token_ids))
        grammar = None
        if spec.sampling_params.grammar is not None:
            self._engine.require_room()  # a gateway asks a full verifier again, 20 times a second
            # Compiling can take seconds and must not block the event loop.
            grammar = await asyncio.to_thread(self._engine.compile_grammar, spec)
        return self._engine.open(spec, on_reply, grammar, version)

    def _step(self, handle: int, request: pb.VerifierRequest) -> None:
        kind = request.WhichOneof("request")
        if kind == "step":
            self._engine.submit(handle, wire.verify_step_from_wire(request.step))
        elif kind != "steer":  # which gateways of earlier versions send
            raise InvalidRequest("after `open`, a session accepts only `step`", param="request")


def _span_attributes(commit: Commit) -> Attributes:
    return {
        "outrider.epoch": commit.epoch,
        "outrider.base_len": commit.base_len,
        "outrider.num_tokens": len(commit.token_ids),
        "outrider.num_draft_tokens": commit.num_draft_tokens,
        "outrider.num_accepted_tokens": commit.num_accepted_tokens,
        "outrider.batch_sessions": commit.timings.batch_sessions,
        "outrider.draft_us": commit.timings.draft_us,
        "outrider.queue_us": commit.timings.queue_us,
        "outrider.forward_us": commit.timings.forward_us,
        "outrider.sample_us": commit.timings.sample_us,
    }
