"""A page in a browser on this machine does not reach a gateway without keys by a name of its own (DNS rebinding)."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest
from gateway_script import ScriptedService
from gateway_servers import ALICE, key_file, open_servers

from outrider.gateway.config import GatewayConfig
from outrider.gateway.servers.http.admission import check_host
from outrider.shared.errors import InvalidRequest

REBOUND = {"host": "rebind.attacker.example:8000"}


LOCAL = ["127.0.0.1", "127.0.0.1:8000", "[::1]", "[::1]:8000", "localhost", "LOCALHOST:1", "localhost.", "gateway:8000"]
FOREIGN = [
    "evil.example",
    "evil.example:80",
    "evil.example.",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "[a.b]",
]


@pytest.mark.parametrize("host", ["", *LOCAL, "a.localhost:8000", "proxy.example", "Proxy.Example:443"])
def test_addresses_local_names_and_allowed_ones_are_answered(host: str) -> None:
    check_host(host, {"proxy.example"})


@pytest.mark.parametrize("host", FOREIGN)
def test_other_names_are_not(host: str) -> None:
    with pytest.raises(InvalidRequest, match="--allowed-hosts"):
        check_host(host, {"proxy.example"})


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/", "/fleet", "/metrics"])
async def test_a_rebound_name_gets_nothing(service: ScriptedService, path: str) -> None:
    async with (
        open_servers(service, GatewayConfig(port=0, grpc_port=0)) as servers,
        httpx.AsyncClient(base_url=servers.url) as http,
    ):
        assert (await http.get(path)).status_code == 200
        refused = await http.get(path, headers=REBOUND)
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "host"
        posted = await http.post("/v1/completions", json={"prompt": "Hello"}, headers=REBOUND)
        assert posted.status_code == 400
    assert service.num_opened == 0


async def test_names_are_not_looked_at_where_keys_are_required(service: ScriptedService, tmp_path: Path) -> None:
    """Nor where the gateway listens beyond loopback: there it is reached by names that it cannot know."""
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(tmp_path))
    async with open_servers(service, config) as servers, httpx.AsyncClient(base_url=servers.url) as http:
        headers = {**REBOUND, "authorization": f"Bearer {ALICE}"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200
