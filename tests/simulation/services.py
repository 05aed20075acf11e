"""The simulated processes: verifiers, drafters and gateways, made of the product's own classes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from prometheus_client import CollectorRegistry

from outrider.drafter_service.config import DrafterConfig
from outrider.drafter_service.engine import DrafterEngine
from outrider.drafter_service.metrics import DrafterMetrics
from outrider.drafter_service.server import DrafterServicer
from outrider.drafter_service.start import describe as describe_drafter
from outrider.drafting.methods.interface import DraftMethod
from outrider.drafting.methods.ngram import NgramMethod
from outrider.engine.attention.block_manager import BlockManager
from outrider.engine.certificate import Certificate
from outrider.engine.sampling.grammar import GrammarState
from outrider.gateway import __main__ as gateway_main
from outrider.gateway.admission.auth import Admission
from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.servers.http.app import create_app
from outrider.gateway.servers.live_service import LiveService
from outrider.shared.log import commit_scripts
from outrider.shared.log.commit_log import CommitLog
from outrider.shared.log.log_budget import LogBudget
from outrider.shared.log.patient_redis import PatientRedis
from outrider.shared.messages import SessionSpec
from outrider.shared.speculative_config import parse_speculative_config
from outrider.v1 import drafter_pb2_grpc, verifier_pb2_grpc
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.engine import VerifierEngine
from outrider.verifier_service.metrics import VerifierMetrics
from outrider.verifier_service.reload.served_target import TargetState
from outrider.verifier_service.rounds import EngineLimits
from outrider.verifier_service.row_outputs import host_outputs
from outrider.verifier_service.server import VerifierServicer
from outrider.verifier_service.start import describe as describe_verifier
from outrider.verifier_service.timing.step_costs import StepCosts
from tests.simulation.grpc_links import SimChannel, SimServer
from tests.simulation.links import Network
from tests.simulation.loop import Process
from tests.simulation.redis_process.node import SimRedisClient
from tests.simulation.toy import GRAMMARS, MAX_MODEL_LEN, MODEL, TOKENIZER, GuessingMethod, ToyRunner

# Few blocks: sessions preempt each other.
NUM_BLOCKS, BLOCK_SIZE = 24, 4
_CERTIFICATE = Certificate(holds=True, checks=(), failing_operation=None, seconds=0.0)


def _add_health(server: SimServer) -> None:
    servicer = health.aio.HealthServicer()
    servicer._server_status[""] = health_pb2.HealthCheckResponse.SERVING
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)


class _Engine(VerifierEngine):
    """on_open: told of each session with a grammar."""

    on_open: Callable[[SessionSpec], None]

    def compile_grammar(self, spec: SessionSpec) -> GrammarState | None:
        self.on_open(spec)
        return super().compile_grammar(spec)


class VerifierNode:
    """A verifier's process. Call it in the process's lane. on_open: told of each session with a grammar."""

    def __init__(
        self,
        net: Network,
        process: Process,
        address: str,
        *,
        max_num_seqs: int,
        drafts: bool,
        on_open: Callable[[SessionSpec], None],
    ) -> None:
        self.process = process
        runner: Any = ToyRunner(NUM_BLOCKS, BLOCK_SIZE)
        config = VerifierConfig(model=MODEL, max_num_seqs=max_num_seqs)
        methods: dict[str, DraftMethod] = {"draft_model": GuessingMethod()} if drafts else {}
        self.engine = _Engine(
            runner,
            BlockManager(NUM_BLOCKS, BLOCK_SIZE),
            EngineLimits(max_num_seqs, 32, 8, MAX_MODEL_LEN),
            _CERTIFICATE,
            VerifierMetrics(CollectorRegistry()),
            StepCosts([(1, 0.005), (64, 0.01)]),
            methods,
        )
        self.engine.rounds.outputs = host_outputs  # no compiler in the loop
        self.engine._grammars = GRAMMARS  # type: ignore[assignment]
        self.engine.on_open = on_open
        server = SimServer(net, process, address)
        describe = partial(describe_verifier, config, self.engine, TargetState("sim"))
        verifier_pb2_grpc.add_VerifierServicer_to_server(VerifierServicer(self.engine, describe), server)
        _add_health(server)
        self.engine.start()

    def leaks(self) -> list[str]:
        engine = self.engine
        engine.blocks.check_integrity()
        num_blocks = engine.blocks.num_blocks - engine.blocks.num_free_blocks
        found = {"sessions": engine.num_sessions, "opened sessions": engine._num_open, "blocks": num_blocks}
        return [f"{self.process.name} has {count} {what} left" for what, count in found.items() if count]


class DrafterNode:
    """A drafter's process. Call it in the process's lane. version: of what it drafts with."""

    def __init__(self, net: Network, process: Process, address: str, version: int = 0) -> None:
        self.process = process
        self.method = GuessingMethod(version)
        methods: dict[str, DraftMethod] = {
            "draft_model": self.method,
            "ngram": NgramMethod(prompt_lookup_min=1, prompt_lookup_max=3),
        }
        metrics = DrafterMetrics(CollectorRegistry())
        self.engine = DrafterEngine(methods, max_num_seqs=8, metrics=metrics)
        server = SimServer(net, process, address)
        servicer = DrafterServicer(self.engine, partial(describe_drafter, DrafterConfig(), self.engine))
        drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server)
        _add_health(server)
        self.engine.start()

    def leaks(self) -> list[str]:
        found = {
            "sessions": self.engine.num_sessions,
            "opened sessions": self.engine._num_open,
            "sessions of its method": self.method.num_sessions,
        }
        return [f"{self.process.name} has {count} {what} left" for what, count in found.items() if count]


class GatewayNode:
    """A gateway's process: `serve` is its life, `app` what its HTTP server is given once it is up, with `admission`."""

    def __init__(self, net: Network, process: Process, config: GatewayConfig) -> None:
        self.process = process
        self.net = net
        self.app: Any = None
        self.admission: Admission | None = None
        self.config = config
        process.spawn(self._serve())

    def reload_keys(self) -> None:
        if self.admission is not None:
            self.admission.reload_keys()

    async def _serve(self) -> None:
        """gateway.__main__.serve without settings and sockets."""
        net, config = self.net, self.config
        redis: Any = SimRedisClient(net, self.process)
        patient = PatientRedis(redis, patience_s=config.redis_patience_s, scripts=commit_scripts.ALL)
        budget = LogBudget(max_record_bytes=1 << 20, total_bytes=1 << 24, clock=time.monotonic)
        log = CommitLog(patient, ttl_s=config.session_ttl_s, ended_ttl_s=config.ended_ttl_s, budget=budget)

        def channel(address: str, _name: str) -> Any:
            return SimChannel(net, self.process, address)

        self.generation = generation = Generation(
            config=config,
            speculative=parse_speculative_config(config.speculative_config),
            tokenizer=TOKENIZER,
            verifiers=Pool("verifier", config.verifiers, gateway_main._verifier_info, channel),
            drafters=Pool("drafter", config.drafters, gateway_main._drafter_info, channel),
            metrics=GatewayMetrics(CollectorRegistry()),
        )
        self.service = LiveService(config, generation, log)
        await log.start()
        await asyncio.gather(generation.verifiers.start(), generation.drafters.start())
        self.admission = Admission.from_config(config)
        self.app = create_app(self.service, admission=self.admission, api_docs=False, playground=False)
        net.servers[self.process.name] = self
        await gateway_main._watch(self.service)

    def leaks(self) -> list[str]:
        generation = self.generation
        members = [*generation.verifiers.members, *generation.drafters.members]
        found = {
            "choices running": generation.metrics.running._value.get(),
            "leases": sum(member.num_sessions for member in members),
            "outputs waiting": generation.starts.num_waiting,
            "outputs started": generation.starts._num_held,
        }
        left = [f"{self.process.name} has {count} {what} left" for what, count in found.items() if count]
        names = sorted(task.get_name() for task in self.process.open_tasks if not self._is_background(task))
        return left + [f"{self.process.name} has a task left: {name}" for name in names]

    def _is_background(self, task: asyncio.Task[Any]) -> bool:
        if task.get_name() in ("watch-verifier", "watch-drafter", "redis-sender"):
            return True
        code = getattr(task.get_coro(), "cr_code", None)
        return code is not None and code.co_name in ("_serve",)
