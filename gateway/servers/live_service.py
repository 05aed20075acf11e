"""The running gateway as the HTTP and gRPC servers use it (gateway.servers.service.GatewayService)."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from outrider.gateway.admission.readiness import Readiness, ReadyState
from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.drafter_choice import is_served
from outrider.gateway.fleet.pool import InfoT, Pool
from outrider.gateway.fleet.view import FleetView, fleet_view
from outrider.gateway.openai.receipt_signature import ReceiptKey
from outrider.gateway.openai.usage import SpecMetricsLevel
from outrider.gateway.request.answers import AnswerKind, Prepared, Wanted
from outrider.gateway.request.served import AnswerDefaults, RequestLimits, Served, ServedModel
from outrider.gateway.request.start import begin, resume
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.tracing import traced
from outrider.gateway.request.types import METHOD_AUTO, METHOD_OFF, GenerationUpdate, ValidRequest
from outrider.gateway.responses.store import ResponseStore
from outrider.gateway.tool_calls.recognise import recognise_reasoning_parser, recognise_tool_call_parser
from outrider.shared.checkpoint.sampling_defaults import load_sampling_defaults
from outrider.shared.errors import Unavailable
from outrider.shared.log.commit_log import CommitLog
from outrider.shared.log.log_budget import LogBudget
from outrider.shared.messages import VerifierInfo
from outrider.shared.telemetry import Exposed, model_labels
from outrider.shared.version import outrider_version

if TYPE_CHECKING:
    from outrider.shared.tracing.otlp import Tracer

log = logging.getLogger(__name__)


class LiveService:
    def __init__(
        self, config: GatewayConfig, generation: Generation, commit_log: CommitLog, tracer: Tracer | None = None
    ) -> None:
        self._config = config
        self._generation = generation
        self._commit_log = commit_log
        self._tracer = tracer
        self._created = int(time.time())
        self._readiness = Readiness(generation.verifiers)
        self._logged_warning = ""
        # Kept when members leave the fleet.
        self._target: VerifierInfo | None = None
        self._methods: set[str] = set()
        self.tokenizer: Tokenizer = generation.tokenizer
        self._reasoning_parser, self._tool_call_parser = _parsers(config, self.tokenizer)
        self._sampling_defaults = load_sampling_defaults(
            config.model, config.generation_config, config.override_generation_config
        )
        self.limits = RequestLimits(max_n=config.max_n, max_body_bytes=int(config.max_body_mb * 2**20))
        self.spec_metrics = SpecMetricsLevel(config.per_request_spec_decode_metrics)
        self.receipt_key = ReceiptKey.load(config.receipt_key, "receipt-key") if config.receipt_key else None
        self.response_store = _response_store(config, commit_log)
        self.version = outrider_version()
        # The one it is bound to, once there is a gRPC server.
        self.grpc_port = -1

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
            has_unseen_members=self._generation.verifiers.has_unseen or self._generation.drafters.has_unseen,
            created=self._created,
            reasoning_parser=self._reasoning_parser,
            tool_call_parser=self._tool_call_parser,
            reasoning_field=self._config.reasoning_field,
            sampling_defaults=self._sampling_defaults,
            answer_defaults=AnswerDefaults(
                self._config.return_tokens_as_token_ids, self._config.enable_force_include_usage
            ),
        )

    @property
    def served(self) -> Served:
        return Served(self.model, self.tokenizer, self.limits)

    def begin(self, kind: AnswerKind, prepared: Prepared) -> Prepared:
        self._readiness.check()
        plan = prepared.options.response
        if self.response_store is not None and plan is not None and plan.num_stored_bytes:
            self.response_store.reserve(prepared.requests[0].owner, plan.num_stored_bytes)
        return self._traced(begin(self._commit_log, kind, prepared, self._generation.kinds.for_new_request()))

    async def resume(self, wanted: Wanted) -> Prepared:
        self._readiness.check()
        self._generation.metrics.resumed.inc()
        resumed = await resume(self._commit_log, wanted, self.model.name)
        owned = resumed.owned_by(wanted.owner, wanted.caller)
        return self._traced(replace(owned, carrier=wanted.carrier))

    def generate(self, request: ValidRequest) -> AsyncGenerator[GenerationUpdate, None]:
        self._readiness.check_open()
        return self._generation.generate(request)

    def _traced(self, prepared: Prepared) -> Prepared:
        return prepared if self._tracer is None else traced(self._tracer, prepared)

    def ready(self) -> ReadyState:
        return self._readiness.state(self._warning())

    def render_metrics(self) -> bytes:
        metrics = self._generation.metrics
        verifiers = self._generation.verifiers.healthy()
        metrics.members.labels("verifier").set(len(verifiers))
        metrics.kv_usage.set(_kv_usage([member.info for member in verifiers if member.info is not None]))
        metrics.members.labels("drafter").set(len(self._generation.drafters.healthy()))
        metrics.waiting.set(self._generation.starts.num_waiting)
        metrics.verifier_kinds.set(len(self._generation.kinds.present()))
        metrics.log_restores.set(self._commit_log.num_restores)
        return Exposed(
            metrics.registry, self._config.metrics_prefix, lambda: model_labels(self._model_name or "")
        ).render()

    @property
    def _model_name(self) -> str | None:
        """The model's name in requests; None before a verifier has been reached."""
        target = self._known_target()
        return None if target is None else self._config.served_model_name or target.model

    def fleet(self) -> FleetView:
        return fleet_view(
            self.version,
            self._model_name,
            self._generation.verifiers.members,
            self._generation.drafters.members,
            self._warning(),
            self.grpc_port,
            self._config.failover_s,
        )

    def drain(self) -> None:
        """Refuses new requests from now on; /ready reports it."""
        self._readiness.is_draining = True

    async def check_redis(self) -> None:
        self._readiness.redis = await self._commit_log.check()

    def log_warning(self) -> None:
        """Logs the warning when it comes up and when it is over. To be called now and then."""
        now = self._warning()
        if now and now != self._logged_warning:
            log.warning(now)
        elif self._logged_warning and not now:
            log.info("over: %s", self._logged_warning)
        self._logged_warning = now

    def _warning(self) -> str:
        """Returns the warning; empty if all is as configured, and before a verifier has been reached."""
        method, generation = self._generation.speculative.method, self._generation
        if method in (METHOD_AUTO, METHOD_OFF) or not generation.verifiers.healthy():
            return ""
        if is_served(method, generation.verifiers, generation.drafters):
            return ""
        return (
            f"--speculative-config: no drafter or verifier serves method {method} now; requests that name no other are "
            "decoded without drafts"
        )

    def _known_methods(self) -> set[str]:
        """Returns every method ever offered: a request for one is served without drafts while its drafters are away."""
        offered = [info.methods for info in _seen(self._generation.drafters)]
        offered += [info.local_methods for info in _seen(self._generation.verifiers)]
        self._methods.update(method.name for methods in offered for method in methods)
        return self._methods

    def _known_target(self) -> VerifierInfo | None:
        """Returns the info of a verifier that serves, else of the last one that did: requests can wait for one."""
        serving = [member.info for member in self._generation.verifiers.healthy()]
        known = [*serving, self._target, *_seen(self._generation.verifiers)]
        self._target = next((info for info in known if info is not None), None)
        return self._target


def _kv_usage(verifiers: Sequence[VerifierInfo]) -> float:
    """The share of their KV blocks that is in use, of all together; 1 without a verifier: there is no room."""
    num_blocks = sum(info.num_blocks for info in verifiers)
    return 1.0 - sum(info.num_free_blocks for info in verifiers) / num_blocks if num_blocks else 1.0


def _seen(pool: Pool[InfoT]) -> list[InfoT]:
    """Returns what the members said when they were last reached, also of those that are away now."""
    return [member.info for member in pool.members if member.info is not None]


def _response_store(config: GatewayConfig, commit_log: CommitLog) -> ResponseStore | None:
    """Returns the store, in the log's Redis with a budget of its own; None if responses are not stored."""
    if not config.stored_response_ttl_s:
        return None
    total_bytes = int(config.max_stored_mb * 2**20)
    budget = LogBudget(max_record_bytes=total_bytes, total_bytes=total_bytes)
    return ResponseStore(commit_log.redis, ttl_s=config.stored_response_ttl_s, budget=budget)


def _parsers(config: GatewayConfig, tokenizer: Tokenizer) -> tuple[str, str]:
    """Returns the rows of tool_calls/formats.py to read outputs by: those set, else those of the chat template."""
    template = tokenizer.tool_template_source
    reasoning, calls = config.reasoning_parser, config.tool_call_parser
    if reasoning == "auto":
        reasoning = recognise_reasoning_parser(template)
    if calls == "auto":
        calls = recognise_tool_call_parser(template, tokenizer.control_tokens)
    log.info("reasoning parser: %s, tool call parser: %s", reasoning, calls)
    return reasoning, calls
