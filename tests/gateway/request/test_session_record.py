"""The record of a request: nothing of it may be lost, of any field that there is or will be."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared, ResponsePlan
from outrider.gateway.request.record import RECORD_VERSION, SessionRecord, new_record
from outrider.gateway.request.types import ValidRequest
from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.shared.errors import InternalError, Unavailable
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import (
    Grammar,
    GrammarKind,
    SamplingParams,
    SpeculationMode,
    ThinkingBudget,
    stream_key,
)
from outrider.v1 import common_pb2, log_pb2

PARAMS = SamplingParams(
    temperature=0.7,
    top_p=0.9,
    top_k=40,
    min_p=0.05,
    seed=2**64 - 1,
    max_tokens=77,
    min_tokens=3,
    stop_token_ids=(5, 6),
    ignore_eos=True,
    presence_penalty=0.1,
    frequency_penalty=-0.2,
    repetition_penalty=1.3,
    logit_bias=((3, 1.5), (9, -100.0)),
    bad_words=((1, 2), (3,)),
    allowed_token_ids=(1, 2, 3),
    num_logprobs=0,
    num_prompt_logprobs=2,
    logprob_token_ids=(7, 4),
    grammar=Grammar(GrammarKind.LARK, 'start: "é"'),
    thinking_budget=ThinkingBudget(5, 9, begin_token_ids=(8,), call_token_ids=(6, 7), starts_open=True),
)
# The wire form of one entry of PARAMS.logit_bias.
PARAMS_BIAS = common_pb2.SamplingParams(logit_bias={9: -100.0}).SerializeToString()
OUTPUT = OutputPlan(
    reasoning_parser="qwen3",
    tool_call_parser="hermes",
    starts_in_reasoning=True,
    marker_tokens=("</think>", "<think>"),
    properties='{"f": {"a": {"type": "string"}}}',
    parallel=False,
    is_named=True,
    include_reasoning=False,
    reasoning_field="reasoning_content",
    must_call=True,
)
REQUEST = ValidRequest(
    request_id="cmpl-1-0",
    prompt_token_ids=(0, 7, 2**31 - 1),
    sampling_params=PARAMS,
    n=2,
    stop=("\n", "漢"),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    speculation=Speculation(method="ngram", num_speculative_tokens=4, mode="rejection", token_tree=False, learn=False),
    cache_salt="salt",
    marker_tokens=OUTPUT.marker_tokens,
    only_call=OUTPUT,
    predicted_token_ids=(5, 6),
    owner="alice",
)
# What earlier gateways know.
NAMING = dataclasses.replace(REQUEST, predicted_token_ids=())
OLDER = dataclasses.replace(NAMING, sampling_params=dataclasses.replace(PARAMS, logprob_token_ids=()))
OPTIONS = AnswerOptions(
    answer_id="cmpl-1",
    created=1_700_000_000,
    model="demo",
    chat=True,
    stream=True,
    include_usage=True,
    continuous_usage=True,
    echo_texts=("", "b"),
    num_logprobs=0,
    prompt_logprobs=True,
    return_token_ids=True,
    return_tokens_as_token_ids=True,
    annotate=True,
    drop_output=True,
    output=OUTPUT,
    response=ResponsePlan('{"metadata":{}}', "[]"),
    message=True,
    fills_context=True,
    receipt=True,
    tokenizer="0123456789abcdef",
)


def record(**changes: Any) -> SessionRecord:
    prepared = Prepared((REQUEST, dataclasses.replace(REQUEST, request_id="cmpl-1-1")), OPTIONS)
    return dataclasses.replace(new_record(AnswerKind.CHAT, prepared), **changes)


@pytest.mark.parametrize("sample", [PARAMS, REQUEST, REQUEST.speculation, OPTIONS, OUTPUT])
def test_the_samples_leave_no_field_at_its_default(sample: Any) -> None:
    """Or a field that is added and forgotten in the record would not be seen below."""
    for field in dataclasses.fields(sample):
        if field.name not in ("starts", "trace", "caller"):  # of the connection, made anew at each gateway
            assert getattr(sample, field.name) != field.default, f"give {field.name} a value of its own here"


@pytest.mark.parametrize("numerics", [None, "", "bfloat16/cpu/cpu/tp1/aa"])
def test_everything_is_read_back(numerics: str | None) -> None:
    before = record(numerics=numerics)
    assert SessionRecord.decode(before.encode()) == before


def test_a_record_from_before_the_field_leaves_the_kind_open() -> None:
    message = log_pb2.SessionRecord.FromString(record(numerics="bfloat16/cpu/cpu/tp1/aa").encode())
    message.ClearField("numerics")
    assert SessionRecord.decode(message.SerializeToString()).numerics is None


def test_what_was_not_said_stays_unsaid() -> None:
    bare = ValidRequest("r", (1,), SamplingParams())
    before = new_record(AnswerKind.GRPC, Prepared((bare,), AnswerOptions("r", 0, "demo", False)))
    assert SessionRecord.decode(before.encode()) == before
    assert before.prepared.options.echo_texts is None
    assert before.prepared.options.output is None
    assert before.prepared.requests[0].speculation.token_tree is None


def test_modes_and_noise_are_settled_once() -> None:
    seeded = record()
    assert seeded.modes == (SpeculationMode.REJECTION,) * 2
    expected = tuple(stream_key(2**64 - 1, REQUEST.prompt_token_ids, choice) for choice in range(2))
    assert seeded.stream_keys == (expected, expected)
    free = dataclasses.replace(REQUEST, sampling_params=SamplingParams(temperature=1.0))
    records = [new_record(AnswerKind.CHAT, Prepared((free,), OPTIONS)) for _ in range(2)]
    assert len({key for one in records for keys in one.stream_keys for key in keys}) == 4
    assert records[0].nonce != records[1].nonce


def test_choices_count_over_the_prompts() -> None:
    two = record()
    assert two.num_choices == 4
    assert [two.place(choice) for choice in range(4)] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_an_older_gateway_can_go_on_with_a_request_that_has_nothing_new() -> None:
    doors = dataclasses.replace(OPTIONS, echo_texts=None, return_tokens_as_token_ids=False)
    doors = dataclasses.replace(doors, output=dataclasses.replace(OUTPUT, parallel=True))
    full, doors = doors, dataclasses.replace(doors, fills_context=False)
    parsed = dataclasses.replace(doors, response=None, message=False)
    one_call = dataclasses.replace(parsed, output=OUTPUT)
    plain = dataclasses.replace(parsed, output=None)
    with_ids = dataclasses.replace(plain, return_tokens_as_token_ids=True)
    echo = dataclasses.replace(plain, echo_texts=("a",))
    echoed_prompt = dataclasses.replace(echo, chat=False)
    all_options = (plain, echoed_prompt, parsed, doors, with_ids, echo, one_call, full)
    assert [version(options, OLDER) for options in all_options] == [1, 1, 2, 3, 4, 4, 5, RECORD_VERSION]
    assert version(plain, NAMING) == 5  # it names tokens
    assert version(plain, REQUEST) == RECORD_VERSION  # it predicts


def version(options: AnswerOptions, *requests: ValidRequest) -> int:
    return log_pb2.SessionRecord.FromString(new_record(AnswerKind.CHAT, Prepared(requests, options)).encode()).version


@pytest.mark.parametrize("params", [PARAMS, SamplingParams(logit_bias=PARAMS.logit_bias)], ids=["both", "biases"])
def test_lists_of_all_prompts_are_kept_once(params: SamplingParams) -> None:
    lists = dataclasses.replace(params, bad_words=params.bad_words and tuple((token, 7) for token in range(500)))
    own = [dataclasses.replace(lists, max_tokens=1 + place, logprob_token_ids=()) for place in range(20)]
    requests = tuple(dataclasses.replace(NAMING, sampling_params=each) for each in own)
    before = new_record(AnswerKind.CHAT, Prepared(requests, OPTIONS))
    alone = new_record(AnswerKind.CHAT, Prepared(requests[:1], OPTIONS))
    assert SessionRecord.decode(before.encode()) == before
    assert before.encode().count(PARAMS_BIAS) == alone.encode().count(PARAMS_BIAS) == 1
    plain = dataclasses.replace(OPTIONS, output=None, fills_context=False)
    assert version(plain, *requests[:1]) < version(plain, *requests) == 5


@pytest.mark.parametrize("field", ["bad_words", "logit_bias"])
def test_each_prompt_keeps_lists_of_its_own(field: str) -> None:
    other = dataclasses.replace(OLDER, sampling_params=dataclasses.replace(OLDER.sampling_params, **{field: ()}))
    before = new_record(AnswerKind.CHAT, Prepared((OLDER, other), OPTIONS))
    assert SessionRecord.decode(before.encode()) == before
    assert version(dataclasses.replace(OPTIONS, output=None, fills_context=False), OLDER, other) < 5


def test_another_version_is_refused_by_name() -> None:
    message = log_pb2.SessionRecord.FromString(record().encode())
    message.version = RECORD_VERSION + 1
    with pytest.raises(Unavailable, match=f"record has version {RECORD_VERSION + 1}, this gateway reads"):
        SessionRecord.decode(message.SerializeToString())


@pytest.mark.parametrize("data", [b"\xff\xff", log_pb2.SessionRecord(version=RECORD_VERSION).SerializeToString()])
def test_a_broken_record_is_an_error_of_ours(data: bytes) -> None:
    with pytest.raises(InternalError, match="broken"):
        SessionRecord.decode(data)
