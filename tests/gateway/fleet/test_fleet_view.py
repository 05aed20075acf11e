"""GET /fleet: members as the pool has them, in every state a member can be in, and who may look."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import httpx
import pytest
from gateway_script import ScriptedService
from gateway_servers import ALICE, key_file, open_servers

from outrider.gateway.config import GatewayConfig
from outrider.gateway.fleet.pool import Member
from outrider.gateway.fleet.view import fleet_view
from outrider.shared.messages import (
    DrafterInfo,
    DraftHead,
    DraftMethodInfo,
    Learning,
    RowInvarianceCertificate,
    VerifierInfo,
)

VERIFIER = VerifierInfo(
    model="demo-target",
    version="1.2.3",
    vocab_size=4096,
    max_model_len=512,
    eos_token_ids=(0,),
    dtype="bfloat16",
    device="cpu",
    hidden_size=64,
    num_hidden_layers=4,
    num_blocks=100,
    num_free_blocks=60,
    block_size=16,
    num_sessions=5,
    num_waiting=1,
    max_sessions=32,
    noise_version=1,
    certificate=RowInvarianceCertificate(True),
    local_methods=(DraftMethodInfo("suffix"), DraftMethodInfo("eagle3", heads=(DraftHead("code", "runs/code", 2, 5),))),
    numerics="bfloat16/cpu/cpu/tp1/00",
    target_version=2,
    learning=Learning(
        20_000, num_taken=1, tokens_before=1.5, tokens_after=1.75, refusal="it loses", num_salts=3, num_salt_heads=2
    ),
)
HEAD = {
    "name": "code",
    "model": "runs/code",
    "version": 2,
    "num_sessions": 5,
    "num_drafts": 0,
    "num_accepted_tokens": 0,
}
METHODS = (DraftMethodInfo("draft_model", "demo-draft"), DraftMethodInfo("ngram"))
DRAFTER = DrafterInfo("1.2.3", METHODS, noise_version=1, num_sessions=2, max_sessions=64)


@pytest.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel("127.0.0.1:1") as channel:
        yield channel


async def test_members_that_answer(channel: grpc.aio.Channel) -> None:
    verifiers = [Member("v:1", channel, VERIFIER, healthy=True, num_sessions=3)]
    drafters = [Member("d:1", channel, DRAFTER, healthy=True, num_sessions=4)]
    assert fleet_view("1.2.3", "served", verifiers, drafters) == {
        "version": "1.2.3",
        "model": "served",
        "verifiers": [
            {
                "address": "v:1",
                "healthy": True,
                "model": "demo-target",
                "device": "cpu",
                "dtype": "bfloat16",
                "num_sessions": 5,  # other gateways have some there too
                "max_sessions": 32,
                "num_waiting": 1,
                "num_blocks": 100,
                "num_free_blocks": 60,
                "block_size": 16,
                "numerics": "bfloat16/cpu/cpu/tp1/00",
                "target_version": 2,
                "next_numerics": "",
                "methods": [
                    {"name": "suffix", "model": "", "version": 0, "heads": []},
                    {"name": "eagle3", "model": "", "version": 0, "heads": [HEAD]},
                ],
                "learning": {
                    "num_tokens": 20_000,
                    "num_dropped_tokens": 0,
                    "num_private_tokens": 0,
                    "num_taken": 1,
                    "num_rolled_back": 0,
                    "num_refused": 0,
                    "tokens_before": 1.5,
                    "tokens_after": 1.75,
                    "refusal": "it loses",
                    "num_salts": 3,
                    "num_salt_heads": 2,
                },
            }
        ],
        "drafters": [
            {
                "address": "d:1",
                "healthy": True,
                "num_sessions": 4,  # two have come since the last look
                "max_sessions": 64,
                "methods": [
                    {"name": "draft_model", "model": "demo-draft", "version": 0, "heads": []},
                    {"name": "ngram", "model": "", "version": 0, "heads": []},
                ],
            }
        ],
        "gateway": {"num_running": 3, "grpc_port": -1, "failover_s": 0.0},
        "warning": "",
    }


async def test_members_that_are_gone_or_were_never_there(channel: grpc.aio.Channel) -> None:
    drafters = [Member("gone:1", channel, DRAFTER, num_sessions=1), Member[DrafterInfo]("never:1", channel)]
    view = fleet_view("1.2.3", None, [Member[VerifierInfo]("v:1", channel)], drafters)
    gone, never = view["drafters"]
    assert (gone["healthy"], gone["num_sessions"]) == (False, 0)
    assert [method["name"] for method in gone["methods"]] == ["draft_model", "ngram"]  # what it served
    assert never == {"address": "never:1", "healthy": False, "num_sessions": 0, "max_sessions": 0, "methods": []}
    [verifier] = view["verifiers"]
    assert (verifier["healthy"], verifier["model"], verifier["num_blocks"]) == (False, "", 0)
    assert view["model"] is None


async def test_it_is_behind_the_key(service: ScriptedService, tmp_path: Path) -> None:
    config = GatewayConfig(port=0, grpc_port=0, api_keys_file=key_file(tmp_path))
    async with open_servers(service, config) as servers, httpx.AsyncClient(base_url=servers.url) as client:
        assert (await client.get("/fleet")).status_code == 401
        answer = await client.get("/fleet", headers={"authorization": f"Bearer {ALICE}"})
    assert answer.json() == service.fleet()


async def test_it_is_in_the_document(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schema = document["paths"]["/fleet"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert schema == {"$ref": "#/components/schemas/FleetView"}
    properties = document["components"]["schemas"]["VerifierView"]["properties"]
    assert properties["num_free_blocks"]["type"] == "integer"
