"""The gateway's generation over engines in this process instead of the two fleets, without Redis.

Policies, decode loop, stop strings and detokenization are the gateway's own. Not here: failover and resuming, since a
verifier is lost only with this process.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.decode_loop import decode
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.drafter_choice import AUTO_ORDER
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.proposals.drafter_connection import Lease
from outrider.gateway.proposals.drafting import Drafting
from outrider.gateway.request.commit_sink import CommitSink
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ValidRequest
from outrider.offline.in_process import EngineDrafter, EngineVerifier
from outrider.shared.errors import CommitRefused, OutriderError
from outrider.shared.log.commit_log import LogEntry
from outrider.shared.messages import DrafterOffer, SessionSpec
from outrider.shared.speculative_config import SpeculativeConfig

if TYPE_CHECKING:  # it loads torch
    from outrider.offline.engines import Engines

# seconds; a local drafter lives as long as its verifier, so only a hanging one is given up
_DRAFT_TIMEOUT_S = 60.0


class NoLog:
    """gateway.request.types.EntryLog of a request that cannot be resumed: refuses gaps and repeats, stores nothing."""

    def __init__(self) -> None:
        self._end = 0

    async def append(self, entry: LogEntry) -> None:
        if entry.base_len != self._end:
            raise CommitRefused(f"an append at output index {entry.base_len} of a log that ends at {self._end}")
        self._end = entry.end


class OfflineGeneration(Generation):
    """Generation in this process: at most `max_num_seqs` choices of all requests are decoded at a time."""

    def __init__(
        self, engines: Engines, speculative: SpeculativeConfig, tokenizer: Tokenizer, *, max_num_seqs: int
    ) -> None:
        super().__init__(
            config=GatewayConfig(),
            speculative=speculative,
            tokenizer=tokenizer,
            verifiers=Pool("verifier", (), _nobody),
            drafters=Pool("drafter", (), _nobody),
            metrics=GatewayMetrics(CollectorRegistry()),
        )
        self._engines = engines
        self._room = asyncio.Semaphore(max_num_seqs)

    async def _decode_with_failover(self, request: ValidRequest, spec: SessionSpec, sink: CommitSink) -> None:
        async with self._room:
            verifier = EngineVerifier(self._engines.verifier)
            drafting = Drafting(
                spec,
                sink.committed_token_ids,
                self._lease,
                self._draft_plan(request),
                timeout_s=_DRAFT_TIMEOUT_S,
                metrics=self.metrics,
                hint=self.hint_of(""),
            )
            try:
                await verifier.open(spec)
                await decode(spec, verifier, drafting, sink)
            finally:
                await verifier.close()
                await drafting.close()

    def _offers(self, *, token_tree: bool) -> tuple[DrafterOffer, ...]:
        served = self._engines.methods if self._engines.drafter else {}
        limits = {name: served[name].limit(token_tree=token_tree) for name in AUTO_ORDER if name in served}
        return tuple(DrafterOffer(name, limit) for name, limit in limits.items())

    def _lease(self, wanted: str) -> Lease | None:
        engines = self._engines
        if engines.drafter is None or wanted not in engines.methods:
            return None
        return Lease(EngineDrafter(engines.drafter), engines.methods[wanted], lambda: None)


async def _nobody(_channel: Any, _timeout_s: float) -> Any:
    raise OutriderError("there are no fleets offline")
