"""The running gateway: a Redis that takes no writes is reported at once, and the settings reach the served model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import grpc.aio
import pytest
import redis.asyncio as aioredis
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from verifier_fleet import Fleet, members_with, verifier_info

from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared, ResponsePlan, Wanted
from outrider.gateway.request.types import ValidRequest
from outrider.gateway.servers.live_service import LiveService
from outrider.shared.checkpoint.sampling_defaults import SamplingDefaults
from outrider.shared.errors import QuotaExceeded, Unavailable
from outrider.shared.log.commit_log import CommitLog
from outrider.shared.messages import DrafterInfo, VerifierInfo
from outrider.shared.sampling_params import SamplingParams
from outrider.shared.speculative_config import parse_speculative_config
from tests.gateway.small_tokenizers import byte_fallback_tokenizer
from tests.redis_server import RedisServer


@pytest.fixture
async def service(redis_server: RedisServer) -> AsyncIterator[LiveService]:
    async def verifier(channel: grpc.aio.Channel, timeout_s: float) -> VerifierInfo:
        raise Unavailable("there is none")

    async def drafter(channel: grpc.aio.Channel, timeout_s: float) -> DrafterInfo:
        raise Unavailable("there is none")

    commit_log = CommitLog.connect(redis_server.url, ttl_s=60)
    await commit_log.start()
    generation = Generation(
        config=GatewayConfig(),
        speculative=parse_speculative_config(""),
        tokenizer=byte_fallback_tokenizer(),
        verifiers=Pool("verifier", (), verifier, lambda address, name: grpc.aio.insecure_channel(address)),
        drafters=Pool("drafter", (), drafter, lambda address, name: grpc.aio.insecure_channel(address)),
        metrics=GatewayMetrics(CollectorRegistry()),
    )
    yield LiveService(GatewayConfig(), generation, commit_log)
    await commit_log.close()


@pytest.mark.parametrize("problem", ["full", "read-only"])
async def test_a_redis_that_takes_no_writes_refuses_requests_at_once(
    service: LiveService, redis_server: RedisServer, problem: str
) -> None:
    async with aioredis.Redis.from_url(redis_server.url) as client:
        if problem == "full":
            await client.config_set("maxmemory", 1)
        else:
            await client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            await service.check_redis()
            state = service.ready()
            assert not state.ready
            assert "Redis takes no writes" in state.reason
            with pytest.raises(Unavailable, match="takes no writes") as refused:
                service.begin(AnswerKind.CHAT, Prepared((), AnswerOptions("r", 0, "m", chat=True)))
            assert refused.value.retry_after_s
            with pytest.raises(Unavailable, match="takes no writes"):
                await service.resume(Wanted("r", "", {}))
        finally:
            await client.config_set("maxmemory", 0)
            await client.execute_command("REPLICAOF", "NO", "ONE")
    await service.check_redis()
    assert service.ready().reason == "no verifier is serving"


async def test_sampling_defaults_are_the_checkpoints_unless_set(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6}))

    def defaults(**settings: str) -> SamplingDefaults:
        config = GatewayConfig(model=str(tmp_path), **settings)  # type: ignore[arg-type]
        generation = Generation(
            config,
            parse_speculative_config(""),
            byte_fallback_tokenizer(),
            Fleet(members_with(verifier_info())),
            Pool("drafter", (), _no_drafter, lambda address, name: grpc.aio.insecure_channel(address)),
            GatewayMetrics(CollectorRegistry()),
        )
        log = CommitLog.connect("redis://127.0.0.1:1/0", ttl_s=1)
        return LiveService(config, generation, log).model.sampling_defaults

    assert defaults() == SamplingDefaults(temperature=0.6)
    assert defaults(generation_config="vllm") == SamplingDefaults()
    assert defaults(override_generation_config='{"top_k": 3}') == SamplingDefaults(temperature=0.6, top_k=3)


async def _no_drafter(channel: grpc.aio.Channel, timeout_s: float) -> DrafterInfo:
    raise Unavailable("there is none")


async def test_what_stored_responses_hold_is_refused_before_a_request_begins(service: LiveService) -> None:
    """And only those that are to be stored."""
    request = ValidRequest("resp_1", (1,), SamplingParams(max_tokens=1))
    long = "[" + " " * (int(GatewayConfig().max_stored_mb * 2**20) // 4) + "]"

    def begun(number: int, input_items: str) -> Prepared:
        plan = ResponsePlan("{}", input_items)
        options = AnswerOptions(f"resp_{number}", 0, "m", chat=True, response=plan)
        return service.begin(AnswerKind.RESPONSE, Prepared((request,), options).owned_by("ann"))

    with pytest.raises(QuotaExceeded, match="stored responses: this API key"):
        begun(1, long)
    begun(2, "")
    assert begun(3, "[]").requests[0].starts


@pytest.mark.parametrize(
    ("verifiers", "usage"),
    [((), 1.0), (((100, 60), (300, 300)), 0.1), (((100, 0),), 1.0)],
    ids=["none", "two", "full"],
)
async def test_routers_read_the_fleet_s_kv_use(verifiers: tuple[tuple[int, int], ...], usage: float) -> None:
    infos = [replace(verifier_info(), num_blocks=blocks, num_free_blocks=free) for blocks, free in verifiers]
    generation = Generation(
        GatewayConfig(),
        parse_speculative_config(""),
        byte_fallback_tokenizer(),
        Fleet(members_with(*infos)),
        Pool("drafter", (), _no_drafter, lambda address, name: grpc.aio.insecure_channel(address)),
        GatewayMetrics(CollectorRegistry()),
    )
    log = CommitLog.connect("redis://127.0.0.1:1/0", ttl_s=1)
    for prefix in ("outrider", "vllm"):
        text = LiveService(GatewayConfig(metrics_prefix=prefix), generation, log).render_metrics().decode()
        values = {
            sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples
        }
        assert values[f"{prefix}:fleet_kv_cache_usage_perc"] == pytest.approx(usage)
        assert {f"{prefix}:num_requests_running", f"{prefix}:num_requests_waiting"} <= values.keys()
