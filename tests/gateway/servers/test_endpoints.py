"""What the servers show and take: reflection and documentation, message and metadata sizes, TLS at both of them."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from gateway_script import ScriptedService
from gateway_servers import open_servers
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.gateway.config import GatewayConfig
from outrider.gateway.servers.endpoints import load_tls
from outrider.shared import rpc
from outrider.shared.errors import ConfigError
from outrider.shared.healthcheck import probe_context, reason_not_well
from outrider.shared.service import is_enabled_at
from outrider.shared.tls import TlsConfig, client_context
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc
from tests.certificates import Authority

LOOPBACK = ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")
OUTSIDE = ("0.0.0.0", "::", "10.0.0.1", "gateway", "")


# ---- what is shown ----------------------------------------------------------------------------------------------


def test_auto_is_on_for_loopback_only() -> None:
    assert all(is_enabled_at(host, None) for host in LOOPBACK)
    assert not any(is_enabled_at(host, None) for host in OUTSIDE)
    for host in (*LOOPBACK, *OUTSIDE):
        assert is_enabled_at(host, True)
        assert not is_enabled_at(host, False)


def reflects(address: str) -> bool:
    """Asked with the synchronous client: grpc.aio reports INTERNAL when its write meets the end of the stream."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=60)
        try:
            reply = next(call)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            raise
        return "outrider.v1.Gateway" in {entry.name for entry in reply.list_services_response.service}


@pytest.mark.parametrize(
    ("host", "setting", "shown"),
    [("127.0.0.1", None, True), ("127.0.0.1", False, False), ("0.0.0.0", None, False), ("0.0.0.0", True, True)],
)
async def test_reflection_and_documentation(
    service: ScriptedService, host: str, setting: bool | None, shown: bool
) -> None:
    config = GatewayConfig(host=host, port=0, grpc_port=0, reflection=setting, api_docs=setting)
    async with open_servers(service, config) as servers, httpx.AsyncClient(base_url=servers.url, timeout=30) as http:
        assert await asyncio.to_thread(reflects, servers.grpc_address) == shown
        for path in ("/docs", "/openapi.json"):
            response = await http.get(path)
            assert response.status_code == (200 if shown else 404)
        assert "server" not in response.headers


# ---- sizes ------------------------------------------------------------------------------------------------------


async def test_a_grpc_request_is_as_long_as_a_body_may_be(service: ScriptedService) -> None:
    config = GatewayConfig(port=0, grpc_port=0, max_body_mb=0.5)
    async with open_servers(service, config) as servers, rpc.open_channel(servers.grpc_address) as channel:
        stub: Any = pb_grpc.GatewayStub(channel)
        call = stub.Generate(pb.GenerateRequest(prompt="a" * 600_000))
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "larger than max" in (await call.details() or "")
        call = stub.Generate(pb.GenerateRequest(prompt="a" * 400_000))
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert service.num_opened == 0


async def test_grpc_metadata_is_bounded(service: ScriptedService) -> None:
    config = GatewayConfig(port=0, grpc_port=0)
    async with open_servers(service, config) as servers, rpc.open_channel(servers.grpc_address) as channel:
        stub: Any = pb_grpc.GatewayStub(channel)
        for size, code in (
            (4_000, grpc.StatusCode.OK),
            (rpc.MAX_METADATA_BYTES + 1, grpc.StatusCode.RESOURCE_EXHAUSTED),
        ):
            call = stub.GetModel(pb.GetModelRequest(), metadata=(("x", "y" * size),))
            assert await call.code() is code


# ---- TLS --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutual", [False, True])
async def test_both_doors_over_tls(service: ScriptedService, tmp_path: Path, mutual: bool) -> None:
    authority = Authority(tmp_path, "public")
    server = authority.issue("gateway", addresses=("127.0.0.1",))
    client = authority.issue("client")
    known = TlsConfig(client.cert_file, client.key_file, authority.ca_file)
    unknown = TlsConfig(ca_file=authority.ca_file)
    config = GatewayConfig(
        port=0,
        grpc_port=0,
        tls_cert_file=server.cert_file,
        tls_key_file=server.key_file,
        tls_ca_file=authority.ca_file if mutual else "",
    )
    async with open_servers(service, config) as servers:
        assert servers.url.startswith("https://")
        for tls, is_let_in in ((known, True), (unknown, not mutual)):
            async with rpc.open_channel(servers.grpc_address, tls) as channel:
                assert await rpc.is_serving(channel, 30) == is_let_in
            async with httpx.AsyncClient(base_url=servers.url, verify=client_context(tls), timeout=30) as http:
                if is_let_in:
                    assert (await http.get("/v1/models")).status_code == 200
                else:
                    with pytest.raises((httpx.TransportError, ssl.SSLError)):
                        await http.get("/v1/models")
        own = probe_context({"OUTRIDER_TLS_CERT_FILE": server.cert_file, "OUTRIDER_TLS_KEY_FILE": server.key_file})
        for target in (servers.grpc_address, f"127.0.0.1:{servers.http_port}/ready"):
            assert await asyncio.to_thread(reason_not_well, target, own, 30) is None
            assert await asyncio.to_thread(reason_not_well, target) is not None
        async with httpx.AsyncClient(base_url=servers.url, timeout=30) as http:
            with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
                await http.get("/v1/models")


def test_half_given_settings_name_the_side(tmp_path: Path) -> None:
    issued = Authority(tmp_path, "a").issue("gateway")
    with pytest.raises(ConfigError, match="--tls-key-file is given, so --tls-cert-file must be too"):
        load_tls(GatewayConfig(tls_key_file=issued.key_file))
    with pytest.raises(ConfigError, match="--fleet-tls-cert-file is given, so --fleet-tls-ca-file must be too"):
        load_tls(GatewayConfig(fleet_tls_cert_file=issued.cert_file, fleet_tls_key_file=issued.key_file))
    assert load_tls(GatewayConfig()).server is None


async def test_grpc_connections_are_bounded_and_their_places_given_back(service: ScriptedService) -> None:
    """Connections without a call were not counted by anything."""
    own = (("grpc.use_local_subchannel_pool", 1),)  # a connection of its own for each channel

    async def connects(channel: grpc.aio.Channel, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s):
                await channel.channel_ready()
        except TimeoutError:
            return False
        return True

    async with open_servers(service, GatewayConfig(port=0, grpc_port=0, max_connections=3)) as servers:
        channels = [grpc.aio.insecure_channel(servers.grpc_address, options=own) for _ in range(4)]
        for channel in channels[:3]:
            assert await connects(channel, 60.0)
        assert not await connects(channels[3], 2.0)
        await channels[0].close()
        assert await connects(channels[3], 60.0)
        for channel in channels[1:]:
            await channel.close()
