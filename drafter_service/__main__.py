"""The drafter service: `python -m drafter_service --draft-model models/demo-draft`."""

from __future__ import annotations

import os
import sys
import time

from prometheus_client import CollectorRegistry

from drafter_service.config import DrafterConfig
from drafter_service.engine import DrafterEngine
from drafter_service.methods.registry import build_methods
from drafter_service.metrics import DrafterMetrics
from drafter_service.server import DrafterServicer
from drafter_service.warm_up import warm_up
from engine.coupling import NOISE_VERSION
from outrider.v1 import drafter_pb2_grpc
from shared.config import load_config
from shared.messages import DrafterInfo
from shared.service import Endpoint, is_enabled_at, run_service, serve_until_signal
from shared.telemetry import setup_logging
from shared.tls import server_tls
from shared.tracing import tracing
from shared.version import outrider_version

EPILOG = """examples:
  python -m drafter_service --draft-model models/demo-draft
  python -m drafter_service --draft-model models/demo-eagle3 --target-model models/demo-target
  python -m drafter_service --methods ngram --prompt-lookup-max 4 --port 7012
"""


async def serve(argv: list[str]) -> None:
    config = load_config(
        DrafterConfig, argv, os.environ, prog="python -m drafter_service", description=__doc__ or "", epilog=EPILOG
    )
    tls = server_tls(config.tls_cert_file, config.tls_key_file, config.tls_ca_file)  # before a model is loaded
    with tracing(config.otlp_traces_endpoint, "drafter") as tracer:
        log = setup_logging("drafter", config.log_level)
        registry = CollectorRegistry()
        methods = build_methods(config, log.info)
        for name, method in methods.items():
            if method.info.model:
                started = time.perf_counter()
                warm_up(method)
                log.info("%s is warm (%.1f s)", name, time.perf_counter() - started)
        metrics = DrafterMetrics(registry)
        engine = DrafterEngine(methods, max_num_seqs=config.max_num_seqs, metrics=metrics)
        metrics.watch(lambda: engine.num_sessions)
        servicer = DrafterServicer(engine, lambda: describe(config, engine), tracer)
        await serve_until_signal(
            Endpoint(
                "drafter",
                "outrider.v1.Drafter",
                config.host,
                config.port,
                config.metrics_port,
                config.drain_s,
                tls=tls,
                reflection=is_enabled_at(config.host, config.reflection),
            ),
            lambda server: drafter_pb2_grpc.add_DrafterServicer_to_server(servicer, server),
            registry,
            start=engine.start,
            stop=engine.stop,
        )


def describe(config: DrafterConfig, engine: DrafterEngine) -> DrafterInfo:
    return DrafterInfo(
        version=outrider_version(),
        methods=tuple(method.info for method in engine.methods.values()),
        noise_version=NOISE_VERSION,
        num_sessions=engine.num_sessions,
        max_sessions=config.max_num_seqs,
    )


def main() -> int:
    return run_service("drafter", lambda: serve(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
