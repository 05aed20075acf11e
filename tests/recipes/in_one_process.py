"""A published line of `vllm serve`, read, loaded, started and asked in one process.

Command, checks, download, verifier, gateway and their configs are the product's own; so is the wire between them. What
differs from `outrider serve`: one process, one rank, and a CPU.
"""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import httpx
from prometheus_client import CollectorRegistry

import outrider.gateway.__main__ as gateway_main
from docs.generate.cli_page import command_tree
from outrider.client.cli import serve as serve_module
from outrider.client.doctor.checkpoints import check_checkpoints, check_context
from outrider.client.doctor.speculation import check_speculation
from outrider.client.stack.commands import StackSettings, StackState, gateway_command, verifier_command
from outrider.client.stack.local_models import with_folders
from outrider.drafting.checkpoints.errors import CheckpointRefused
from outrider.drafting.checkpoints.recognise import recognise
from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.servers.http.app import create_app
from outrider.gateway.servers.live_service import LiveService
from outrider.shared import rpc
from outrider.shared.config import load_config
from outrider.shared.errors import ConfigError, OutriderError
from outrider.shared.speculative_config import parse_speculative_config
from outrider.v1 import verifier_pb2_grpc
from outrider.verifier_service import start
from outrider.verifier_service.config import VerifierConfig
from outrider.verifier_service.server import VerifierServicer

_LOG = logging.getLogger("outrider.recipes")


class Refused(Exception):
    """What the user is told."""


@dataclass(frozen=True)
class Serving:
    """client: of the gateway. methods: of the verifier for drafts. needs_one_rank: of a target with an indexer or
    recurrent layers."""

    client: httpx.AsyncClient
    methods: tuple[str, ...]
    needs_one_rank: bool


def read_line(line: Sequence[str], run_dir: Path) -> tuple[StackSettings, str]:
    """What `outrider serve LINE` would start, and what it says that it ignores. Raises Refused."""
    settings: list[StackSettings] = []
    said, complained = io.StringIO(), io.StringIO()
    with (
        patch.object(serve_module, "run_in_foreground", lambda given, _run_dir: settings.append(given)),
        redirect_stdout(said),
        redirect_stderr(complained),
    ):
        try:
            command_tree()["serve"].main([*line, "--run-dir", str(run_dir)], prog_name="serve")
        except SystemExit as end:
            if end.code:
                raise Refused(" ".join(complained.getvalue().split()).rpartition("outrider: ")[2]) from None
    return settings[0], " ".join(said.getvalue().split()).partition("ignored: ")[2]


def checked(settings: StackSettings) -> StackSettings:
    """The settings with folders, after the checks before a start that are about checkpoints. Raises Refused."""
    try:
        settings = with_folders(settings, _LOG.info)
    except ConfigError as error:
        raise Refused(error.message) from error
    checks = [*check_checkpoints(settings.model, settings.draft_folders), *check_context(settings.model, 0)]
    checks += check_speculation(settings, [_kind(folder) for folder in settings.draft_folders])
    failed = [f"{check.name}: {check.found}" for check in checks if check.level == "fail"]
    if failed:
        raise Refused("; ".join(failed))
    return settings


def _kind(folder: str) -> dict[str, str]:
    try:
        return {"path": folder, "kind": recognise(folder)}
    except CheckpointRefused as error:
        return {"path": folder, "problem": error.message}


def configs(settings: StackSettings, redis_url: str) -> tuple[VerifierConfig, GatewayConfig]:
    """Those of the two services, with one rank. Raises Refused."""
    commands = verifier_command(settings), gateway_command(settings, StackState(verifiers=["v:1"]))
    found = []
    try:
        for command, kind in zip(commands, (VerifierConfig, GatewayConfig), strict=True):
            found.append(load_config(kind, command[command.index("-m") + 2 :], {}, prog="", description=""))
    except ConfigError as error:
        raise Refused(error.message) from error
    verifier = replace(
        found[0], tensor_parallel_size=1, kv_cache_mb=8, local_kv_cache_mb=8, num_threads=1, max_num_seqs=4
    )
    # A machine that stalls is no fault of the line.
    return verifier, replace(found[1], redis_url=redis_url, redis_patience_s=300.0)


@asynccontextmanager
async def serving(verifier: VerifierConfig, gateway: GatewayConfig) -> AsyncIterator[Serving]:
    """The gateway in front of the loaded verifier. Raises Refused."""
    registry = CollectorRegistry()
    try:
        start.check_settings(verifier)
        engine, loaded = start.build_engine(verifier, registry, _LOG)
    except OutriderError as error:
        raise Refused(error.message) from error
    engine.start()
    servicer = VerifierServicer(engine, lambda: start.describe(verifier, engine))
    add = partial(verifier_pb2_grpc.add_VerifierServicer_to_server, servicer)
    server = await rpc.start_server("127.0.0.1", 0, add, ("outrider.v1.Verifier",))
    await server.serving()
    try:
        async with _gateway(replace(gateway, verifiers=(f"127.0.0.1:{server.port}",))) as client:
            methods = tuple(method.name for method in engine.local_methods)
            has_indexer = any(shape.index_dim for shape in loaded.layer_shapes)
            yield Serving(client, methods, has_indexer or bool(loaded.recurrent_shapes))
    finally:
        await server.drain(0)
        engine.stop()
        loaded.close()


@asynccontextmanager
async def _gateway(config: GatewayConfig) -> AsyncIterator[httpx.AsyncClient]:
    log = gateway_main.connect_log(config)
    generation = Generation(
        config=config,
        speculative=parse_speculative_config(config.speculative_config),
        tokenizer=gateway_main.load_tokenizer(config),
        verifiers=Pool("verifier", config.verifiers, gateway_main._verifier_info, _channel),
        drafters=Pool("drafter", (), gateway_main._drafter_info, _channel),
        metrics=GatewayMetrics(CollectorRegistry()),
    )
    service = LiveService(config, generation, log)
    await log.start()
    await asyncio.gather(generation.verifiers.start(), generation.drafters.start())
    await service.check_redis()
    app = create_app(service, api_docs=False, playground=False)
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test", timeout=300) as client:
            yield client
    finally:
        await asyncio.gather(generation.verifiers.close(), generation.drafters.close())
        await log.close()


def _channel(address: str, server_name: str) -> Any:
    return rpc.open_channel(address, None, server_name)
