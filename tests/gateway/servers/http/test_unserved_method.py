"""What the gateway says when its own method is one that nobody serves: in /ready, in /fleet and in the log."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry
from verifier_fleet import Fleet, members_with, verifier_info

from outrider.gateway.config import GatewayConfig
from outrider.gateway.decoding.generation import Generation
from outrider.gateway.fleet.pool import Member, Pool
from outrider.gateway.metrics import GatewayMetrics
from outrider.gateway.openai.checks import check_speculation
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.live_service import LiveService
from outrider.shared.errors import InvalidRequest
from outrider.shared.log.commit_log import CommitLog
from outrider.shared.messages import DrafterInfo, DraftMethodInfo, VerifierInfo
from outrider.shared.request_params import Speculation
from outrider.shared.speculative_config import parse_speculative_config

TARGET = verifier_info()
HEAD = DraftMethodInfo("eagle3", vocab_size=100, hidden_layers=(1,), hidden_size=1)
HEAD_OF_ANOTHER_TARGET = replace(HEAD, hidden_size=64)
WARNING = "no drafter or verifier serves method eagle3 now"


class Drafters(Pool[DrafterInfo]):
    """Members by hand; the channels lead nowhere."""

    def __init__(self, methods: Sequence[DraftMethodInfo]) -> None:
        super().__init__("drafter", (), _no_info)
        self.serve(methods)

    def serve(self, methods: Sequence[DraftMethodInfo]) -> None:
        info = DrafterInfo("1", tuple(methods), 1, num_sessions=2, max_sessions=2)
        self._members = {"d:1": Member("d:1", grpc.aio.insecure_channel("d:1"), info, healthy=True)}


async def _no_info(channel: grpc.aio.Channel, timeout_s: float) -> DrafterInfo:
    raise NotImplementedError


def service_of(
    tokenizer: Tokenizer, method: str, drafters: Drafters, verifiers: Sequence[VerifierInfo] = (TARGET,)
) -> LiveService:
    config = GatewayConfig()
    generation = Generation(
        config,
        parse_speculative_config(f'{{"method": "{method}"}}'),
        tokenizer,
        Fleet(members_with(*verifiers)),
        drafters,
        GatewayMetrics(CollectorRegistry()),
    )
    return LiveService(config, generation, CommitLog.connect("redis://127.0.0.1:1/0", ttl_s=1))


async def test_a_method_that_nobody_serves(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    drafters = Drafters([HEAD_OF_ANOTHER_TARGET, DraftMethodInfo("ngram")])
    service = service_of(tokenizer, "eagle3", drafters)
    assert service.ready().ready
    assert WARNING in service.ready().warning
    assert service.fleet()["warning"] == service.ready().warning
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            service.log_warning()
        [record] = caplog.records
        assert (record.levelname, WARNING in record.message) == ("WARNING", True)
        drafters.serve([HEAD])
        service.log_warning()
    assert (service.ready().warning, service.fleet()["warning"]) == ("", "")
    assert caplog.records[-1].message.startswith("over: ")


@pytest.mark.parametrize(
    ("method", "verifiers"),
    [
        ("auto", [TARGET]),
        ("off", [TARGET]),
        ("ngram", [TARGET]),
        ("eagle3", [replace(TARGET, local_methods=(HEAD,))]),
        ("eagle3", []),  # not ready at all, which is said instead
    ],
)
async def test_nothing_to_warn_of(tokenizer: Tokenizer, method: str, verifiers: list[VerifierInfo]) -> None:
    service = service_of(tokenizer, method, Drafters([DraftMethodInfo("ngram")]), verifiers)
    assert service.fleet()["warning"] == ""
    assert service.ready().warning == ""


async def test_a_drafter_that_was_never_reached_may_serve_any_method(tokenizer: Tokenizer) -> None:
    """A gateway that starts while the drafters are dead, beside a verifier whose own methods it knows."""
    drafters = Drafters([DraftMethodInfo("suffix")])
    (dead,) = drafters.members
    seen, dead.info, dead.healthy = dead.info, None, False
    service = service_of(tokenizer, "auto", drafters, [replace(TARGET, local_methods=(DraftMethodInfo("ngram"),))])
    assert service.model.draft_methods == ("ngram",)
    assert check_speculation(Speculation(method="suffix"), service.model).method == "suffix"
    with pytest.raises(InvalidRequest, match="is not one of"):
        check_speculation(Speculation(method="guess"), service.model)
    dead.info, dead.healthy = seen, True
    assert check_speculation(Speculation(method="suffix"), service.model).method == "suffix"
    with pytest.raises(InvalidRequest, match="'eagle3' is not one of auto, off, ngram, suffix"):
        check_speculation(Speculation(method="eagle3"), service.model)


async def test_what_was_seen_before_the_first_request_is_known_while_all_are_away(tokenizer: Tokenizer) -> None:
    """Model and methods: a request of such a gateway waits for a verifier instead of being refused."""
    drafters = Drafters([DraftMethodInfo("suffix")])
    service = service_of(tokenizer, "auto", drafters, [replace(TARGET, local_methods=(DraftMethodInfo("ngram"),))])
    for member in (*drafters.members, *service._generation.verifiers.members):
        member.healthy = False
    assert service.model.name == TARGET.model
    assert service.model.draft_methods == ("ngram", "suffix")
    assert service.fleet()["model"] == TARGET.model
    assert service.ready().reason == "no verifier is serving"
