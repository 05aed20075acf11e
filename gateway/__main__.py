"""The gateway: `python -m gateway --model models/demo-target`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator

import grpc.aio
import uvicorn
from prometheus_client import CollectorRegistry

from gateway.admission import Admission
from gateway.app import create_app
from gateway.config import GatewayConfig
from gateway.doors import DoorsTls, fleet_channels, grpc_door, http_config, load_tls
from gateway.generation import Generation
from gateway.grpc_server import SERVICE_NAMES, add_gateway_servicer
from gateway.live_service import LiveService
from gateway.metrics import GatewayMetrics
from gateway.pool import Pool
from gateway.tokenizer import Tokenizer
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from shared import rpc, wire
from shared.commit_log import CommitLog
from shared.config import load_config
from shared.errors import ConfigError
from shared.messages import DrafterInfo, VerifierInfo
from shared.service import is_enabled_at, run_service
from shared.speculative_config import parse_speculative_config
from shared.telemetry import setup_logging
from shared.tracing import tracing

EPILOG = """examples:
  python -m gateway --model models/demo-target
  python -m gateway --model models/demo-target --drafters drafter-a:7002,drafter-b:7002
  python -m gateway --model models/demo-target --speculative-config '{"method": "ngram", "num_speculative_tokens": 4}'
"""
REDIS_CHECK_INTERVAL_S = 1.0


class _Server(uvicorn.Server):
    """Signals are handled here, once, for both doors."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _verifier_info(channel: grpc.aio.Channel, timeout_s: float) -> VerifierInfo:
    stub = verifier_pb2_grpc.VerifierStub(channel)
    return wire.verifier_info_from_wire(await stub.GetInfo(verifier_pb2.GetVerifierInfoRequest(), timeout=timeout_s))


async def _drafter_info(channel: grpc.aio.Channel, timeout_s: float) -> DrafterInfo:
    stub = drafter_pb2_grpc.DrafterStub(channel)
    return wire.drafter_info_from_wire(await stub.GetInfo(drafter_pb2.GetDrafterInfoRequest(), timeout=timeout_s))


async def serve(argv: list[str]) -> None:
    config = load_config(
        GatewayConfig, argv, os.environ, prog="python -m gateway", description=__doc__ or "", epilog=EPILOG
    )
    if not config.model:
        raise ConfigError("--model: name the folder of the target's checkpoint", param="model")
    tls, admission = load_tls(config), Admission.from_config(config)
    log = setup_logging("gateway", config.log_level)
    commit_log = CommitLog.connect(config.redis_url, ttl_s=config.session_ttl_s, patience_s=config.redis_patience_s)
    generation = Generation(
        config=config,
        speculative=parse_speculative_config(config.speculative_config),
        tokenizer=Tokenizer.load(config.model),
        verifiers=Pool("verifier", config.verifiers, _verifier_info, fleet_channels(tls.fleet)),
        drafters=Pool("drafter", config.drafters, _drafter_info, fleet_channels(tls.fleet)),
        metrics=GatewayMetrics(CollectorRegistry()),
    )
    with tracing(config.otlp_traces_endpoint, "gateway") as tracer:
        service = LiveService(config, generation, commit_log, tracer)
        await commit_log.start()
        await asyncio.gather(generation.verifiers.start(), generation.drafters.start())
        redis_watch = asyncio.create_task(_watch_redis(service))
        try:
            await _serve_doors(config, service, admission, tls, log)
        finally:
            redis_watch.cancel()
            await asyncio.gather(generation.verifiers.close(), generation.drafters.close())
            await commit_log.close()


async def _serve_doors(
    config: GatewayConfig, service: LiveService, admission: Admission, tls: DoorsTls, log: logging.Logger
) -> None:
    api_docs = is_enabled_at(config.host, config.api_docs)
    app = create_app(service, admission=admission, api_docs=api_docs, playground=config.playground)
    http = _Server(http_config(config, app, tls.server))
    grpc_server = None
    if config.grpc_port >= 0:
        grpc_server = await rpc.start_server(
            config.host,
            config.grpc_port,
            lambda server: add_gateway_servicer(server, service),
            SERVICE_NAMES,
            grpc_door(config, admission, tls.server),
        )
    async with rpc.until_signal() as signalled, rpc.on_hangup(admission.reload_keys):
        http_task = asyncio.create_task(http.serve())
        while not http.started and not http_task.done():  # noqa: ASYNC110 - uvicorn has a flag, no event
            await asyncio.sleep(0.01)
        if not http_task.done():
            port = http.servers[0].sockets[0].getsockname()[1]
            if grpc_server is not None:
                await grpc_server.serving()
                log.info("gRPC on %s:%d", config.host, grpc_server.port)
            print(f"gateway serving on {config.host}:{port}", flush=True)
            stop = asyncio.create_task(signalled.wait())
            await asyncio.wait({stop, http_task}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        service.drain()
        http.should_exit = True
        drains = [http_task] if grpc_server is None else [http_task, grpc_server.drain(config.drain_s)]
        await asyncio.gather(*drains)


async def _watch_redis(service: LiveService) -> None:
    while True:
        await service.check_redis()
        await asyncio.sleep(REDIS_CHECK_INTERVAL_S)


def main() -> int:
    return run_service("gateway", lambda: serve(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
