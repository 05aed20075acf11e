"""Both servers on real sockets in front of a scripted service, guarded as the gateway guards them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from outrider.gateway.admission.auth import Admission
from outrider.gateway.config import GatewayConfig
from outrider.gateway.servers.endpoints import grpc_options, http_config, load_tls
from outrider.gateway.servers.grpc_server import SERVICE_NAMES, add_gateway_servicer
from outrider.gateway.servers.http.app import create_app
from outrider.gateway.servers.service import GatewayService
from outrider.shared import rpc
from outrider.shared.api_keys import key_line
from outrider.shared.service import is_enabled_at

ALICE, BOB = "or-alice-alice-alice", "or-bob-bob-bob"


@dataclass(frozen=True)
class GatewayServers:
    """Where they are; `admission` is what guards both, `num_connections` counts the REST server's."""

    url: str
    grpc_address: str
    http_port: int
    admission: Admission
    num_connections: Callable[[], int]


def key_file(folder: Path, *lines: str) -> str:
    path = folder / "api-keys"
    path.write_text("\n".join(lines or (key_line("alice", ALICE), key_line("bob", BOB))))
    return str(path)


@asynccontextmanager
async def open_servers(service: GatewayService, config: GatewayConfig) -> AsyncIterator[GatewayServers]:
    """As gateway/__main__.py does it, but for the service behind them."""
    tls, admission = load_tls(config), Admission.from_config(config)
    api_docs = is_enabled_at(config.host, config.api_docs)
    app = create_app(service, admission=admission, api_docs=api_docs, playground=config.playground)
    http = uvicorn.Server(http_config(config, app, tls.server))
    http_task = asyncio.create_task(http.serve())
    grpc_server = await rpc.start_server(
        config.host,
        config.client_grpc_port,
        lambda server: add_gateway_servicer(server, service),
        SERVICE_NAMES,
        grpc_options(config, admission, tls.server),
    )
    await grpc_server.serving()
    async with asyncio.timeout(60):
        while not http.started:  # noqa: ASYNC110 - uvicorn has a flag, no event
            await asyncio.sleep(0.005)
    port = http.servers[0].sockets[0].getsockname()[1]
    scheme = "http" if tls.server is None else "https"
    try:
        yield GatewayServers(
            f"{scheme}://127.0.0.1:{port}",
            f"127.0.0.1:{grpc_server.port}",
            port,
            admission,
            lambda: len(http.server_state.connections),
        )
    finally:
        http.should_exit = True
        await asyncio.gather(http_task, grpc_server.drain(0))
