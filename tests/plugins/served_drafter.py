"""The drafter's own service over real gRPC, on a thread of its own, with n-grams and a method that misbehaves."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from prometheus_client import CollectorRegistry

from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafter_service.server import DrafterServicer
from outrider.drafter_service.tenants import Tenants
from outrider.drafting.methods.ngram import NgramMethod
from outrider.drafting.session import DraftSession
from outrider.shared import rpc
from outrider.shared.messages import DrafterInfo, DraftMethodInfo, Proposal
from outrider.shared.tls import TlsConfig
from outrider.v1 import drafter_pb2_grpc

# Nothing takes so long but on a machine that is busy otherwise.
LONG_S = 30.0


class Method(NgramMethod):
    """N-grams, of which `spoil` makes other proposals, while `gate` lets them pass."""

    def __init__(self, vocab_size: int = 0, model: str = "") -> None:
        super().__init__(prompt_lookup_min=2, prompt_lookup_max=4)
        self.info = DraftMethodInfo(name="ngram", vocab_size=vocab_size, model=model, max_num_draft_tokens=32)
        self.gate = threading.Event()
        self.gate.set()
        self.spoil: Callable[[Proposal], Proposal] = lambda proposal: proposal
        self.num_proposals = 0

    def propose(self, sessions: Sequence[DraftSession]) -> list[Proposal]:
        self.gate.wait(LONG_S)
        self.num_proposals += len(sessions)
        return [self.spoil(proposal) for proposal in super().propose(sessions)]


def with_ids(make: Callable[[int], int]) -> Callable[[Proposal], Proposal]:
    return lambda proposal: replace(proposal, token_ids=tuple(make(entry) for entry in proposal.token_ids))


class ServedDrafter:
    """A drafter that can be killed and started again on its port."""

    def __init__(
        self,
        method: Method | None = None,
        *,
        port: int = 0,
        digest: str = "",
        tenants: Tenants | None = None,
        tls: TlsConfig | None = None,
        max_num_seqs: int = 64,
    ) -> None:
        self.method = method or Method()
        self.port = port
        self._digest, self._tenants, self._tls, self._max_num_seqs = digest, tenants, tls, max_num_seqs
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        metrics = DrafterMetrics(CollectorRegistry())
        self.engine = DrafterEngine({"ngram": self.method}, max_num_seqs=self._max_num_seqs, metrics=metrics)
        self.engine.start()
        info = DrafterInfo("test", (self.method.info,), 1, 0, self._max_num_seqs, self._digest)
        servicer = DrafterServicer(self.engine, lambda: info, tenants=self._tenants)
        self._server = self._run(
            rpc.start_server(
                "127.0.0.1",
                self.port,
                lambda server: drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server),
                (),
                rpc.ServerOptions(tls=self._tls),
            )
        )
        self.port = self._server.port

    def kill(self) -> None:
        """Streams are cut; nobody is told."""
        self._run(self._server.grpc_server.stop(0))
        self.engine.stop()

    def close(self) -> None:
        self.method.gate.set()
        self.kill()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(LONG_S)


@contextmanager
def drafter(method: Method | None = None, **options: Any) -> Iterator[ServedDrafter]:
    served = ServedDrafter(method, **options)
    try:
        yield served
    finally:
        served.close()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.005)
