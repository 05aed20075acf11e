"""The gateway's generation over a verifier's engine in this process instead of the two fleets, without Redis.

Policies, decode loop, stop strings and detokenization are the gateway's own. Not here: failover and resuming, since a
verifier is lost only with this process.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from outrider.gateway.admission.fair_starts import Place
from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.decode_loop import decode
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.proposals.ask import LocalMethods
from outrider.gateway.proposals.drafting import Drafting
from outrider.gateway.request.commit_sink import CommitSink
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ValidRequest
from outrider.offline.in_process import EngineVerifier
from outrider.shared.errors import OutriderError
from outrider.shared.messages import SessionSpec
from outrider.shared.speculative_config import SpeculativeConfig

if TYPE_CHECKING:  # it loads torch
    from outrider.offline.engines import Engines


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

    async def _decode_with_failover(
        self, request: ValidRequest, spec: SessionSpec, sink: CommitSink, place: Place
    ) -> None:
        async with self._room:
            verifier = EngineVerifier(self._engines.verifier)
            drafting = Drafting(
                spec,
                sink.committed_token_ids,
                _no_drafter,
                self._draft_plan(request),
                timeout_s=self.config.draft_timeout_ms * 1e-3,
                metrics=self.metrics,
                local=LocalMethods.of("", self._engines.target),
            )
            try:
                await verifier.open(spec)
                await decode(spec, verifier, drafting, sink)
            finally:
                await verifier.close()
                await drafting.close()


def _no_drafter(_wanted: str) -> None:
    """Leases no drafter: the verifier drafts itself."""


async def _nobody(_channel: Any, _timeout_s: float) -> Any:
    raise OutriderError("there are no fleets offline")
