"""The gateway: `python -m outrider.gateway --model models/demo-target`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import uvicorn
from prometheus_client import CollectorRegistry

from outrider.gateway.admission.auth import Admission
from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.request.chat_template import ChatTemplate
from outrider.gateway.request.text_trial import try_texts
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.endpoints import GatewayTls, fleet_channels, grpc_options, http_config, load_tls
from outrider.gateway.servers.grpc_server import SERVICE_NAMES, add_gateway_servicer
from outrider.gateway.servers.http.app import Cors, create_app
from outrider.gateway.servers.live_service import LiveService
from outrider.shared import rpc, wire
from outrider.shared.checkpoint.hub import local_checkpoint
from outrider.shared.config import load_config
from outrider.shared.errors import ConfigError, Unavailable
from outrider.shared.listening import held_port
from outrider.shared.log.commit_log import CommitLog
from outrider.shared.log.log_budget import LogBudget
from outrider.shared.messages import DrafterInfo, VerifierInfo
from outrider.shared.service import is_enabled_at, run_service
from outrider.shared.speculative_config import parse_speculative_config
from outrider.shared.telemetry import setup_logging
from outrider.shared.tracing.setup import tracing
from outrider.v1 import drafter_pb2, drafter_pb2_grpc, verifier_pb2, verifier_pb2_grpc

EPILOG = """examples:
  python -m outrider.gateway --model models/demo-target
  python -m outrider.gateway --model models/demo-target --drafters drafter-a:7002,drafter-b:7002
  python -m outrider.gateway --model models/demo-target --speculative-config '{"method": "ngram"}'
"""
# seconds; greatest age of the state of Redis that /ready reports
WATCH_INTERVAL_S = 1.0


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: `serve` handles signals for both servers."""

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
        GatewayConfig, argv, os.environ, prog="python -m outrider.gateway", description=__doc__ or "", epilog=EPILOG
    )
    check_settings(config)
    config = replace(config, model=local_checkpoint(config.model, "--model", weights=False))
    tls, admission = load_tls(config), Admission.from_config(config)
    log = setup_logging("gateway", config.log_level, config.log_format)
    commit_log = connect_log(config)
    generation = Generation(
        config=config,
        speculative=parse_speculative_config(config.speculative_config),
        tokenizer=load_tokenizer(config),
        verifiers=Pool("verifier", config.verifiers, _verifier_info, fleet_channels(tls.fleet)),
        drafters=Pool("drafter", config.drafters, _drafter_info, fleet_channels(tls.fleet)),
        metrics=GatewayMetrics(CollectorRegistry()),
    )
    with tracing(config.otlp_traces_endpoint, "gateway") as tracer:
        service = LiveService(config, generation, commit_log, tracer)
        if config.check_only:
            return
        with (
            held_port(config.host, config.port, "port"),
            held_port(config.host, config.client_grpc_port, "grpc-port"),
        ):
            await start_log(commit_log)
        await asyncio.gather(generation.verifiers.start(), generation.drafters.start())
        watch = asyncio.create_task(_watch(service))
        try:
            await _run_servers(config, service, admission, tls, log)
        finally:
            watch.cancel()
            await asyncio.gather(generation.verifiers.close(), generation.drafters.close())
            await commit_log.close()


def check_settings(config: GatewayConfig) -> None:
    """Checks what can be checked from the settings alone. Raises ConfigError that names the setting."""
    if not config.model:
        raise ConfigError("--model: give the folder of the target's checkpoint", param="model")
    if config.port > 0 and config.port == config.client_grpc_port:
        raise ConfigError(f"--grpc-port: {config.port} is --port already", param="grpc_port")
    for setting, addresses in (("verifiers", config.verifiers), ("drafters", config.drafters)):
        for address in addresses:
            host, _, port = address.rpartition(":")
            if not host or not port.isascii() or not port.isdigit() or not 0 < int(port[:6]) < 2**16:
                raise ConfigError(f"--{setting}: {address!r} is not host:port", param=setting)


def given_template(setting: str) -> str | None:
    """Returns the template that --chat-template names or holds; None for the checkpoint's. Raises ConfigError."""
    if not setting:
        return None
    try:
        # A path has no braces (as in vLLM).
        source = setting if "{" in setting else Path(setting).read_text(encoding="utf-8")
        ChatTemplate(source, {})
    except OSError as error:
        raise ConfigError(f"--chat-template: {setting}: {error.strerror}", param="chat_template") from None
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template: {error}", param="chat_template") from None
    return source


def load_tokenizer(config: GatewayConfig) -> Tokenizer:
    """Raises ConfigError that names the setting."""
    template = given_template(config.chat_template)
    try:
        try_texts(config.model)
        return Tokenizer.load(config.model, chat_template=template)
    except ConfigError as error:
        raise ConfigError(f"--model: {error.message}", param="model") from error


def connect_log(config: GatewayConfig) -> CommitLog:
    """Returns the commit log, not started. Raises ConfigError that names the setting."""
    try:
        return CommitLog.connect(
            config.redis_url,
            ttl_s=config.session_ttl_s,
            patience_s=config.redis_patience_s,
            ended_ttl_s=config.ended_ttl_s,
            # Token ids take at most twice the bytes of their text; more are parameters repeated for many prompts.
            budget=LogBudget(
                max_record_bytes=int(2 * config.max_body_mb * 2**20), total_bytes=int(config.max_log_mb * 2**20)
            ),
        )
    except ValueError as error:  # redis-py's, of the URL
        raise ConfigError(f"--redis-url: {error}", param="redis_url") from None


async def start_log(commit_log: CommitLog) -> None:
    """Waits for Redis. Raises Unavailable that names the setting."""
    try:
        await commit_log.start()
    except Unavailable as error:
        raise Unavailable(f"--redis-url: {error.message}") from error


async def _run_servers(
    config: GatewayConfig, service: LiveService, admission: Admission, tls: GatewayTls, log: logging.Logger
) -> None:
    api_docs = is_enabled_at(config.host, config.api_docs)
    app = create_app(
        service,
        cors=Cors(config.allowed_origins, config.allowed_methods, config.allowed_headers, config.allow_credentials),
        admission=admission,
        api_docs=api_docs,
        playground=config.playground,
        shows_tokenizer=config.enable_tokenizer_info_endpoint,
    )
    http = _Server(http_config(config, app, tls.server))
    grpc_server = None
    if config.client_grpc_port >= 0:
        grpc_server = await rpc.start_server(
            config.host,
            config.client_grpc_port,
            lambda server: add_gateway_servicer(server, service),
            SERVICE_NAMES,
            grpc_options(config, admission, tls.server),
            port_setting="grpc-port",
        )
    async with rpc.until_signal() as signalled, rpc.on_hangup(admission.reload_keys):
        http_task = asyncio.create_task(http.serve())
        while not http.started and not http_task.done():  # noqa: ASYNC110 - uvicorn has a flag, not an event
            await asyncio.sleep(0.01)
        if not http_task.done():
            port = http.servers[0].sockets[0].getsockname()[1]
            if grpc_server is not None:
                await grpc_server.serving()
                service.grpc_port = grpc_server.port
                log.info("gRPC on %s:%d", config.host, grpc_server.port)
            print(f"gateway serving on {config.host}:{port}", flush=True)
            if config.playground:
                host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(config.host, config.host)
                print(f"Open {'http' if tls.server is None else 'https'}://{host}:{port}", flush=True)
            stop = asyncio.create_task(signalled.wait())
            await asyncio.wait({stop, http_task}, return_when=asyncio.FIRST_COMPLETED)
            stop.cancel()
        service.drain()
        http.should_exit = True
        drains = [http_task] if grpc_server is None else [http_task, grpc_server.drain(config.drain_s)]
        await asyncio.gather(*drains)


async def _watch(service: LiveService) -> None:
    while True:
        await service.check_redis()
        service.log_warning()
        await asyncio.sleep(WATCH_INTERVAL_S)


def main() -> int:
    return run_service("gateway", lambda: serve(sys.argv[1:]))


if __name__ == "__main__":
    sys.exit(main())
