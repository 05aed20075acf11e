"""Gateways that follow a script, behind real gRPC sockets: they refuse, stall, vanish and come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import grpc

from outrider.v1 import common_pb2 as common
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc
from tests.ports import nobodys_port

NUM_TOKENS = 12
LONG_S = 60.0
Item = TypeVar("Item")


@dataclass
class Log:
    """What the gateways of a fleet share: which requests there are, and how many tokens their client has."""

    begun: set[str] = field(default_factory=set)
    num_heard: int = 0
    _heard: threading.Condition = field(default_factory=threading.Condition)

    def hear(self, num_tokens: int) -> None:
        with self._heard:
            self.num_heard += num_tokens
            self._heard.notify_all()

    def heard(self, stream: Iterable[Item], num_tokens: Callable[[Item], int]) -> Iterator[Item]:
        """The same items; what they hold counts as heard."""
        for item in stream:
            self.hear(num_tokens(item))
            yield item

    def until_heard(self, num_tokens: int) -> None:
        with self._heard:
            assert self._heard.wait_for(lambda: self.num_heard >= num_tokens, timeout=LONG_S)


class Gateway(pb_grpc.GatewayServicer):
    """Says tokens 0, 1, 2, ... two at a time, and then aborts the call as a lost server would: after `dies_after` of
    them, and at output index `dies_at`. Not before they were heard: of what nobody has read by then gRPC tells nothing.
    """

    def __init__(
        self, log: Log, *, dies_after: int = NUM_TOKENS, dies_at: int = NUM_TOKENS, forgets: bool = False
    ) -> None:
        self._log = log
        self._dies_after = dies_after
        self._dies_at = dies_at
        self._forgets = forgets
        self.calls: list[str] = []
        self.predictions: list[str] = []

    def Generate(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
        self.calls.append("generate")
        self.predictions.append(request.prediction)
        if request.request_id in self._log.begun:
            context.abort(grpc.StatusCode.ABORTED, "a request with this request_id already exists")
        if not self._forgets:
            self._log.begun.add(request.request_id)
        yield from self.replies(0, context)

    def Resume(self, request: pb.ResumeRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
        self.calls.append(f"resume {request.base_len}")
        if request.request_id not in self._log.begun:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        yield from self.replies(request.base_len, context)

    def GetModel(self, request: pb.GetModelRequest, context: grpc.ServicerContext) -> pb.ModelInfo:
        return pb.ModelInfo(model="counting")

    def replies(self, base_len: int, context: grpc.ServicerContext) -> Iterator[pb.GenerateReply]:
        for at in range(base_len, NUM_TOKENS, 2):
            if at - base_len >= self._dies_after or at >= self._dies_at:
                self._log.until_heard(at)
                context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
            yield pb.GenerateReply(
                base_len=at,
                token_ids=[at, at + 1],
                token_texts=[str(at), str(at + 1)],
                text=f"{at}{at + 1}",
                origins=[common.TOKEN_ORIGIN_TARGET] * 2,
                finish_reason=common.FINISH_REASON_LENGTH if at + 2 == NUM_TOKENS else None,
            )


@contextmanager
def serving(gateway: Gateway) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    pb_grpc.add_GatewayServicer_to_server(gateway, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


def nobodys_address() -> str:
    """Where nobody listens."""
    return f"127.0.0.1:{nobodys_port()}"
