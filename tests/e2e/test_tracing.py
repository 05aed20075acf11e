"""Traces of the real stack at a real OTLP/gRPC collector: one trace per request, over three services."""

from __future__ import annotations

import itertools
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import grpc.aio
import httpx
import pytest
from e2e_collector import Collector, RecordedSpan, run_collector
from e2e_gateways import Fleet, Told, read_events
from e2e_rest import Answer, complete, speculation
from e2e_stack import DEMO_DRAFT, RunningStack, run_stack

from outrider.client.stack.own_redis import redis_url_of
from outrider.v1 import common_pb2
from outrider.v1 import gateway_pb2 as pb
from outrider.v1 import gateway_pb2_grpc as pb_grpc
from tests.ports import nobodys_port
from tests.redis_server import RedisServer

pytestmark = pytest.mark.storm

NUM_TOKENS = 40
PROMPT = "def quixotic_zebra(argument):\n"
BODY: dict[str, Any] = {
    "prompt": PROMPT,
    "max_tokens": NUM_TOKENS,
    "temperature": 0.9,
    "seed": 7,
    "ignore_eos": True,
    **speculation("draft_model", 3),
}
SERVICES = {"request": "outrider-gateway", "round": "outrider-gateway"} | {
    "verify": "outrider-verifier",
    "draft": "outrider-drafter",
}
# Processes of one machine read the same clock; a span's beginning is its end less whole microseconds.
CLOCK_SLACK_NS = 10_000


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with run_collector() as running:
        yield running


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[RunningStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OUTRIDER_OTLP_TRACES_ENDPOINT", collector.url)
        patch.setenv("OUTRIDER_FAILOVER_S", "150")
        with run_stack(
            tmp_path_factory.mktemp("traced"), dtype="auto", draft_model=DEMO_DRAFT, is_paced=True
        ) as running:
            yield running


@pytest.fixture(scope="module")
async def http(traced: RunningStack) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=traced.url, timeout=120) as client:
        yield client


def new_trace(flags: str = "01") -> tuple[str, str, dict[str, str]]:
    """Trace id, span id of the caller, and the header that says both."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return trace_id, span_id, {"traceparent": f"00-{trace_id}-{span_id}-{flags}"}


def named(spans: list[RecordedSpan], name: str) -> list[RecordedSpan]:
    return [span for span in spans if span.name == name]


def is_whole(spans: list[RecordedSpan]) -> bool:
    """Every token of every choice, as the gateway and as the verifiers tell it, and each draft that was used."""
    if not named(spans, "request"):
        return False
    [request] = named(spans, "request")
    num_tokens = request["gen_ai.usage.completion_tokens"]
    totals = [sum(span["outrider.num_tokens"] for span in named(spans, name)) for name in ("round", "verify")]
    used = {place(span) for span in named(spans, "round") if span["outrider.num_draft_tokens"]}
    return totals == [num_tokens, num_tokens] and used <= set(map(place, named(spans, "draft")))


def place(span: RecordedSpan) -> tuple[str, int, int]:
    """Which round of which session a span is about."""
    return span["outrider.session_id"], span["outrider.epoch"], span["outrider.base_len"]


def total(spans: list[RecordedSpan], attribute: str) -> int:
    return sum(span[f"outrider.{attribute}"] for span in spans)


async def ask(http: httpx.AsyncClient, headers: dict[str, str], **fields: Any) -> dict[str, Any]:
    reply = await http.post("/v1/completions", json={**BODY, **fields}, headers=headers)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def check_shape(spans: list[RecordedSpan], parent_id: str) -> RecordedSpan:
    """Who made each span, whose child it is, and when it was; returns the request's."""
    [request] = named(spans, "request")
    assert request.parent_id == parent_id
    assert {span.service for span in spans} == set(SERVICES.values())
    for span in spans:
        assert span.service == SERVICES[span.name]
        assert span is request or span.parent_id == request.span_id
        assert request.started_ns - CLOCK_SLACK_NS <= span.started_ns <= span.ended_ns
        # A draft that nobody waits for any more may still be worked on when the request has ended.
        ended_in_time = span.started_ns if span.name == "draft" else span.ended_ns
        assert ended_in_time <= request.ended_ns
    return request


async def test_a_request_is_one_trace_over_three_services(http: httpx.AsyncClient, collector: Collector) -> None:
    trace_id, caller_id, headers = new_trace()
    answer = await ask(http, headers)
    spans = collector.wait(trace_id, is_whole)
    request = check_shape(spans, caller_id)
    assert request["gen_ai.request.id"] == answer["id"]
    assert request["gen_ai.response.model"] == answer["model"]
    assert request["gen_ai.usage.prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert request["gen_ai.usage.completion_tokens"] == answer["usage"]["completion_tokens"] == NUM_TOKENS
    assert request["gen_ai.response.finish_reasons"] == ["length"]
    assert (request["outrider.mode"], request["outrider.method"]) == ("exact", "draft_model")
    assert 0 < request["gen_ai.latency.time_to_first_token"] < request["gen_ai.latency.e2e"]
    assert not request.is_error
    assert request.events == []


async def test_one_span_a_round_that_says_what_the_usage_says(http: httpx.AsyncClient, collector: Collector) -> None:
    trace_id, _, headers = new_trace()
    figures = (await ask(http, headers))["metrics"]["speculative_decoding"]
    spans = collector.wait(trace_id, is_whole)
    rounds, verified, drafted = named(spans, "round"), named(spans, "verify"), named(spans, "draft")
    base_len = 0
    for span in rounds:  # they follow each other without a gap, in tokens and in time
        assert span["outrider.base_len"] == base_len
        base_len += span["outrider.num_tokens"]
    assert all(one.ended_ns <= two.started_ns + CLOCK_SLACK_NS for one, two in itertools.pairwise(rounds))
    assert [place(span) for span in verified] == [place(span) for span in rounds]
    assert len(rounds) - figures["num_spec_steps"] == sum(span["outrider.num_draft_tokens"] == 0 for span in rounds)
    for told in (rounds, verified):
        assert total(told, "num_accepted_tokens") == figures["num_accepted_draft_tokens"]
        assert total(told, "num_draft_tokens") == figures["num_draft_tokens"] > 0
    assert {place(span) for span in rounds if span["outrider.num_draft_tokens"]} <= {place(span) for span in drafted}
    for mine, theirs in zip(rounds, verified, strict=True):
        assert mine["outrider.verify.forward_us"] == theirs["outrider.forward_us"] > 0
        assert mine["outrider.verify.queue_us"] == theirs["outrider.queue_us"]
        # Tokens that were not asked for one by one may be on their way before the gateway waits for them.
        least_us = theirs["outrider.forward_us"] if mine["outrider.num_draft_tokens"] else 0
        assert mine["outrider.verify.wait_us"] >= least_us


async def test_choices_of_one_request_are_in_one_trace(http: httpx.AsyncClient, collector: Collector) -> None:
    trace_id, caller_id, headers = new_trace()
    usage = (await ask(http, headers, n=3, prompt=["def a():", "def b():"]))["usage"]
    spans = collector.wait(trace_id, is_whole)
    request = check_shape(spans, caller_id)
    assert request["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
    assert total(named(spans, "round"), "num_tokens") == usage["completion_tokens"] == 6 * NUM_TOKENS
    assert len({span["outrider.session_id"] for span in named(spans, "round")}) == 6
    assert sorted(map(place, named(spans, "verify"))) == sorted(map(place, named(spans, "round")))


async def test_the_grpc_door_takes_a_trace_from_metadata(traced: RunningStack, collector: Collector) -> None:
    trace_id, caller_id, headers = new_trace()
    request = pb.GenerateRequest(
        prompt=PROMPT, speculation=common_pb2.Speculation(method="ngram", num_speculative_tokens=3)
    )
    request.sampling_params.max_tokens = NUM_TOKENS
    async with grpc.aio.insecure_channel(traced.state.grpc_address) as channel:
        call = pb_grpc.GatewayStub(channel).Generate(request, metadata=tuple(headers.items()))
        usage = [reply async for reply in call][-1].usage
    spans = collector.wait(trace_id, is_whole)
    assert check_shape(spans, caller_id)["gen_ai.usage.completion_tokens"] == usage.completion_tokens


async def test_a_request_without_a_trace_begins_one(http: httpx.AsyncClient, collector: Collector) -> None:
    ids = [(await ask(http, {"traceparent": "nonsense"} if broken else {}))["id"] for broken in (False, True)]

    def roots() -> list[RecordedSpan]:
        return [span for span in named(collector.spans(), "request") if span["gen_ai.request.id"] in ids]

    collector.wait("", lambda _spans: len(roots()) == 2)
    assert [span.parent_id for span in roots()] == ["", ""]
    assert len({span.trace_id for span in roots()}) == 2
    for root in roots():
        check_shape(collector.wait(root.trace_id, is_whole), "")


async def test_a_trace_that_is_not_recorded_stays_so(http: httpx.AsyncClient, collector: Collector) -> None:
    unrecorded, _, headers = new_trace(flags="00")
    await ask(http, headers)
    recorded, _, headers = new_trace()
    await ask(http, headers)
    collector.wait(recorded, is_whole)  # spans are sent in order: those of the first would be here by now
    assert collector.spans(unrecorded) == []


async def test_no_text_leaves_the_services(http: httpx.AsyncClient, collector: Collector) -> None:
    trace_id, _, headers = new_trace()
    answer = await ask(http, headers)
    collector.wait(trace_id, is_whole)
    assert answer["id"].encode() in collector.raw
    assert b"quixotic" not in collector.raw
    written = answer["choices"][0]["text"]
    pieces = {written[start : start + 12] for start in range(len(written) - 12)}
    assert not [piece for piece in pieces if piece.encode() in collector.raw]


async def test_a_client_that_hangs_up_still_ends_its_span(http: httpx.AsyncClient, collector: Collector) -> None:
    trace_id, _, headers = new_trace()
    body = {**BODY, "max_tokens": 1000, "stream": True, "return_token_ids": True}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as reply:
        await anext(reply.aiter_lines())
    [request] = named(collector.wait(trace_id, lambda spans: bool(named(spans, "request"))), "request")
    assert request["gen_ai.usage.completion_tokens"] < 1000
    assert request["gen_ai.response.finish_reasons"] == []


@pytest.fixture(params=["refuses", "hangs"])
def dead_collector(request: pytest.FixtureRequest) -> Iterator[str]:
    """The address of one that is not there, and of one that takes connections and says nothing."""
    if request.param == "refuses":
        yield f"http://127.0.0.1:{nobodys_port()}"
        return
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"http://127.0.0.1:{silent.getsockname()[1]}"


async def test_a_dead_collector_hurts_nobody(
    traced: RunningStack, http: httpx.AsyncClient, dead_collector: str, tmp_path: Path
) -> None:
    expected = await complete(http, BODY)
    redis = cast(RedisServer, SimpleNamespace(url=redis_url_of(traced.state)))  # all that a gateway needs to know of it
    fleet = Fleet(traced.state, redis, tmp_path)
    try:
        gateway = fleet.gateway(otlp_traces_endpoint=dead_collector, drain_s="5")
        async with gateway.client() as client:
            answers: list[Answer] = [await complete(client, BODY) for _ in range(3)]
        assert {answer.token_ids for answer in answers} == {expected.token_ids}
        gateway.process.send_signal(signal.SIGTERM)
        assert gateway.process.wait(timeout=60) == 0
    finally:
        fleet.close()


async def spans_of_a_stream_that_lost(stack: RunningStack, collector: Collector, name: str) -> list[RecordedSpan]:
    """The gateway's spans; the killed process takes its last ones with it."""
    trace_id, _, headers = new_trace()
    killed = False

    def kill_once(told: Told) -> bool:
        nonlocal killed
        if not killed and len(told.blocks) > 20:
            killed = True
            stack.kill(name)
            stack.revive()
        return False

    body = {**BODY, "max_tokens": 600, "stream": True, "return_token_ids": True}
    async with httpx.AsyncClient(base_url=stack.url, timeout=200, headers=headers) as client:
        told = await read_events(client, "POST", "/v1/completions", body=body, until=kill_once)
    assert (told.status, killed, told.done) == (200, True, True)
    spans = collector.wait(trace_id, lambda spans: bool(named(spans, "request")))
    assert total(named(spans, "round"), "num_tokens") == 600
    return spans


def events_of(spans: list[RecordedSpan], name: str) -> list[dict[str, Any]]:
    [request] = named(spans, "request")
    return [attributes for event, attributes in request.events if event == name]


async def test_a_lost_verifier_is_an_event(traced: RunningStack, collector: Collector) -> None:
    spans = await spans_of_a_stream_that_lost(traced, collector, "verifier")
    [event] = events_of(spans, "verifier_lost")
    assert event["outrider.verifier"] == traced.state.verifiers[0]
    later = [base_len for _, epoch, base_len in map(place, named(spans, "round")) if epoch == 1]
    assert min(later) == event["outrider.num_committed_tokens"] > 0


async def test_a_lost_drafter_is_an_event(traced: RunningStack, collector: Collector) -> None:
    """The last test: until another drafter is there, nobody can ask for its method."""
    spans = await spans_of_a_stream_that_lost(traced, collector, "drafter-0")
    # Until the gateway's next look at its fleet a session may find the dead drafter again.
    assert {event["outrider.epoch"] for event in events_of(spans, "drafter_lost")} == {0}
    assert not events_of(spans, "verifier_lost")
