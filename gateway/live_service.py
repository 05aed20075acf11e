"""The running gateway as the two doors see it (gateway.service.GatewayService)."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import TYPE_CHECKING

from gateway.config import GatewayConfig
from gateway.fleet_view import FleetView, fleet_view
from gateway.generation import Generation
from gateway.openai_convert import Prepared
from gateway.request_start import Wanted, begin, resume
from gateway.requests import GenerationUpdate, ValidRequest
from gateway.service import ReadyState, RequestLimits, ServedModel, SpecMetricsLevel
from gateway.session_record import AnswerKind
from gateway.tokenizer import Tokenizer
from gateway.tracing import traced
from shared.commit_log import CommitLog
from shared.errors import Unavailable
from shared.messages import VerifierInfo
from shared.version import outrider_version

if TYPE_CHECKING:
    from shared.tracing.otlp import Tracer


class LiveService:
    def __init__(
        self, config: GatewayConfig, generation: Generation, commit_log: CommitLog, tracer: Tracer | None = None
    ) -> None:
        self._config = config
        self._generation = generation
        self._commit_log = commit_log
        self._tracer = tracer
        self._created = int(time.time())
        self._redis_answers = True
        self._draining = False
        # What the last verifier said; kept while all of them are away, so that requests can wait for one.
        self._target: VerifierInfo | None = None
        self._methods: set[str] = set()
        self.tokenizer: Tokenizer = generation.tokenizer
        self.limits = RequestLimits(max_n=config.max_n, max_body_bytes=int(config.max_body_mb * 2**20))
        self.spec_metrics = SpecMetricsLevel(config.per_request_spec_decode_metrics)
        self.version = outrider_version()

    @property
    def model(self) -> ServedModel:
        target = self._known_target()
        if target is None:
            raise Unavailable("no verifier has been reached yet; try again later")
        return ServedModel(
            name=self._config.served_model_name or target.model,
            max_model_len=target.max_model_len,
            vocab_size=target.vocab_size,
            draft_methods=tuple(sorted(self._known_methods())),
            created=self._created,
        )

    def begin(self, kind: AnswerKind, prepared: Prepared) -> Prepared:
        self._check_open()
        return self._traced(begin(self._commit_log, kind, prepared, self._generation.kinds.for_new_request()))

    async def resume(self, wanted: Wanted) -> Prepared:
        self._check_open()
        self._generation.metrics.resumed.inc()
        resumed = await resume(self._commit_log, wanted, self.model.name)
        return self._traced(replace(resumed, carrier=wanted.carrier))

    def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        self._check_open()
        return self._generation.generate(request)

    def _traced(self, prepared: Prepared) -> Prepared:
        return prepared if self._tracer is None else traced(self._tracer, prepared)

    def _check_open(self) -> None:
        if self._draining:
            raise Unavailable("the gateway is shutting down")

    def ready(self) -> ReadyState:
        """Ready without a drafter too: then everything is decoded without speculation."""
        if self._draining:
            return ReadyState(False, "the gateway is shutting down")
        if not self._redis_answers:
            return ReadyState(False, "Redis does not answer")
        if not self._generation.verifiers.healthy():
            return ReadyState(False, "no verifier is serving")
        return ReadyState(True)

    def render_metrics(self) -> bytes:
        metrics = self._generation.metrics
        metrics.members.labels("verifier").set(len(self._generation.verifiers.healthy()))
        metrics.members.labels("drafter").set(len(self._generation.drafters.healthy()))
        metrics.verifier_kinds.set(len(self._generation.kinds.present()))
        metrics.log_restores.set(self._commit_log.num_restores)
        return metrics.render()

    def fleet(self) -> FleetView:
        target = self._known_target()
        model = None if target is None else self._config.served_model_name or target.model
        return fleet_view(self.version, model, self._generation.verifiers.members, self._generation.drafters.members)

    def drain(self) -> None:
        """No new requests from here on; /ready says so."""
        self._draining = True

    async def check_redis(self) -> None:
        self._redis_answers = await self._commit_log.ping()

    def _known_methods(self) -> set[str]:
        """All that anybody has ever said here: whoever names one while its drafters are away is served without."""
        verifiers, drafters = self._generation.verifiers.healthy(), self._generation.drafters.healthy()
        offered = [member.info.methods for member in drafters if member.info is not None]
        offered += [member.info.local_methods for member in verifiers if member.info is not None]
        self._methods.update(method.name for methods in offered for method in methods)
        return self._methods

    def _known_target(self) -> VerifierInfo | None:
        for member in self._generation.verifiers.healthy():
            self._target = member.info
            break
        return self._target
