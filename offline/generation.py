"""The gateway's generation with the engines in this process in the place of the two fleets, and no Redis.

Policies, the decode loop, stop strings and detokenization are the gateway's own. Not here: a verifier cannot be lost
without this process, so there is no failover, and nothing can be resumed.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from gateway.commit_sink import CommitSink
from gateway.config import GatewayConfig
from gateway.decode_loop import decode
from gateway.drafter_choice import AUTO_ORDER, draft_limit
from gateway.drafter_line import Lease
from gateway.drafting import Drafting
from gateway.generation import Generation
from gateway.metrics import GatewayMetrics
from gateway.pool import Pool
from gateway.requests import ValidRequest
from gateway.tokenizer import Tokenizer
from offline.in_process import EngineDrafter, EngineVerifier
from shared.commit_log import LogEntry
from shared.errors import CommitRefused, OutriderError
from shared.messages import SessionSpec
from shared.speculative_config import SpeculativeConfig

if TYPE_CHECKING:  # it loads torch
    from offline.engines import Engines

# A drafter of this process is as alive as its verifier: only one that hangs is given up.
_DRAFT_TIMEOUT_S = 60.0


class NoLog:
    """gateway.requests.EntryLog of a request that nobody can resume: refuses a gap and a repeat, keeps nothing."""

    def __init__(self) -> None:
        self._end = 0

    async def append(self, entry: LogEntry) -> None:
        if entry.base_len != self._end:
            raise CommitRefused(f"an append at output index {entry.base_len} of a log that ends at {self._end}")
        self._end = entry.end


class OfflineGeneration(Generation):
    """At most `max_num_seqs` choices of all requests are decoded at a time."""

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
                self._policy(request),
                token_tree=self._wants_tree(request),
                timeout_s=_DRAFT_TIMEOUT_S,
                metrics=self.metrics,
            )
            try:
                await verifier.open(spec)
                await decode(spec, verifier, drafting, sink)
            finally:
                await verifier.close()
                await drafting.close()

    def _offered_methods(self, *, token_tree: bool) -> dict[str, int]:
        served = self._engines.methods if self._engines.drafter else {}
        return {name: draft_limit(served[name], token_tree=token_tree) for name in AUTO_ORDER if name in served}

    def _lease(self, wanted: str) -> Lease | None:
        engines = self._engines
        if engines.drafter is None or wanted not in engines.methods:
            return None
        return Lease(EngineDrafter(engines.drafter), engines.methods[wanted], lambda: None)


async def _nobody(_channel: Any, _timeout_s: float) -> Any:
    raise OutriderError("there are no fleets offline")
