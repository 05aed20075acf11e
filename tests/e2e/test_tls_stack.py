"""Mutual TLS on every connection between real processes: it works, and who is not part of it stays outside."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from e2e_stack import wait_until
from e2e_tls import TlsStack, fleet_flags, run_tls_fleet, server_flags
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from outrider.client import AsyncOutriderClient, SamplingParams
from outrider.client.generate import Access, CompletionRequest, stream_completion
from outrider.shared import rpc
from outrider.shared.errors import Unavailable
from outrider.shared.tls import TlsConfig, channel_credentials, client_context
from outrider.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

pytestmark = pytest.mark.storm

BODY = {
    "prompt": "import",
    "max_tokens": 8,
    "temperature": 0,
    "ignore_eos": True,
    "speculation": {"method": "ngram"},
}


@dataclass(frozen=True)
class Gateway:
    port: int
    grpc_port: int
    client: TlsConfig
    environ: dict[str, str]

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsStack]:
    with run_tls_fleet(tmp_path_factory.mktemp("tls-stack")) as stack:
        yield stack


@pytest.fixture(scope="module")
def gateway(fleet: TlsStack) -> Gateway:
    """Doors signed by one authority, its way to the fleet by another."""
    door = fleet.public.issue("door", dns_names=("localhost",))
    member = fleet.fleet.issue("gateway", dns_names=("gateway",))
    port, grpc_port = fleet.start_gateway(
        "gateway", *server_flags(door, fleet.public), *fleet_flags(member, fleet.fleet)
    )
    client = fleet.public.issue("client")
    tls = TlsConfig(client.cert_file, client.key_file, fleet.public.ca_file)
    wait_until(lambda: sees_all(port, tls), 60, "the gateway sees its fleet")
    environ = {
        f"OUTRIDER_TLS_{name}_FILE": path
        for name, path in (("CERT", door.cert_file), ("KEY", door.key_file), ("CA", fleet.public.ca_file))
    }
    return Gateway(port, grpc_port, tls, environ)


def sees_all(port: int, tls: TlsConfig) -> bool:
    """It is ready, and has found a verifier and a drafter."""
    with httpx.Client(base_url=f"https://localhost:{port}", verify=client_context(tls), timeout=20) as http:
        if http.get("/ready").status_code != 200:
            return False
        metrics = http.get("/metrics").text
    return all(f'service="{name}"}} 1.0\n' in metrics for name in ("verifier", "drafter"))


def test_a_completion_through_it_all(gateway: Gateway) -> None:
    with httpx.Client(base_url=gateway.url, verify=client_context(gateway.client), timeout=120) as http:
        plain = http.post("/v1/completions", json={**BODY, "speculation": {"method": "off"}}).json()
        drafted = http.post("/v1/completions", json=BODY).json()
    assert plain["choices"][0]["text"] == drafted["choices"][0]["text"]
    assert plain["usage"]["completion_tokens"] == 8
    assert drafted["metrics"]["speculative_decoding"]["num_spec_tokens"] > 0


async def test_grpc_through_it_all(gateway: Gateway) -> None:
    async with rpc.open_channel(f"localhost:{gateway.grpc_port}", gateway.client) as channel:
        stub: Any = gateway_pb2_grpc.GatewayStub(channel)
        request = gateway_pb2.GenerateRequest(
            prompt="import", sampling_params=common_pb2.SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        )
        replies = [reply async for reply in stub.Generate(request, timeout=60)]
    assert replies[-1].usage.completion_tokens == 8


def test_the_doors_ask_for_a_certificate(gateway: Gateway, fleet: TlsStack) -> None:
    stranger = TlsConfig(ca_file=fleet.public.ca_file)
    with (
        httpx.Client(base_url=gateway.url, verify=client_context(stranger), timeout=20) as http,
        pytest.raises(httpx.TransportError),
    ):
        http.get("/health")


def test_the_containers_health_check(gateway: Gateway) -> None:
    targets = (f"127.0.0.1:{gateway.grpc_port}", f"127.0.0.1:{gateway.port}/ready")
    for environ, code in ((gateway.environ, 0), ({}, 1)):
        done = subprocess.run(
            [sys.executable, "-m", "outrider.shared.healthcheck", *targets],
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done.stdout + done.stderr


def test_reflection_of_the_fleet(fleet: TlsStack) -> None:
    """On for loopback hosts, as the drafter; off where it was said, as at the verifier.

    With the synchronous client: grpc.aio reports INTERNAL when its write meets the end of the stream.
    """
    issued = fleet.fleet.issue("curious", dns_names=("curious",))
    tls = TlsConfig(issued.cert_file, issued.key_file, fleet.fleet.ca_file)
    codes = []
    for port in (fleet.drafter_port, fleet.verifier_port):
        with grpc.secure_channel(f"localhost:{port}", channel_credentials(tls)) as channel:
            stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
            call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
            with suppress(grpc.RpcError):
                for _ in call:
                    pass
            codes.append(call.code())
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.UNIMPLEMENTED]


@pytest.mark.parametrize("kind", ["plain", "of another authority", "without a certificate"])
def test_a_gateway_that_the_fleet_does_not_know(fleet: TlsStack, kind: str) -> None:
    outsider = fleet.public.issue("outsider", dns_names=("gateway",))
    flags: tuple[str, ...] = ()
    if kind == "of another authority":
        flags = fleet_flags(outsider, fleet.fleet)
    elif kind == "without a certificate":
        flags = ("--fleet-tls-ca-file", fleet.fleet.ca_file)
    port, _ = fleet.start_gateway(f"gateway-{kind.replace(' ', '-')}", *flags)
    time.sleep(2.5)  # two looks at the fleet
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as http:
        answer = http.get("/ready")
    assert (answer.status_code, answer.json()["reason"]) == (503, "no verifier is serving")


async def test_the_asyncio_client_shows_a_certificate(gateway: Gateway) -> None:
    address = f"localhost:{gateway.grpc_port}"
    async with AsyncOutriderClient(address, tls=gateway.client) as client:
        assert len((await client.generate("import", SamplingParams(max_tokens=4, ignore_eos=True))).tokens) == 4
    async with AsyncOutriderClient(address, max_retries=0) as client:
        with pytest.raises(Unavailable):
            await client.generate("import")


def test_the_client_and_its_command_show_a_certificate(gateway: Gateway) -> None:
    address, request = f"localhost:{gateway.grpc_port}", CompletionRequest("import", max_tokens=4, ignore_eos=True)
    *tokens, end = stream_completion(address, request, Access(tls=gateway.client))
    assert len(tokens) == end.completion_tokens == 4
    with pytest.raises(Unavailable):
        list(stream_completion(address, request))
    files = {"cert": gateway.client.cert_file, "key": gateway.client.key_file, "ca": gateway.client.ca_file}
    command = [
        sys.executable,
        "-m",
        "outrider.client.cli.main",
        "complete",
        "import",
        "--max-tokens",
        "4",
        "--address",
        address,
    ]
    command += [part for name, path in files.items() for part in (f"--tls-{name}-file", path)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert found.returncode == 0, found.stderr
    assert "4 tokens" in found.stdout
