"""Dataclasses and the messages that mirror them: no field is lost, and neighbouring versions read each other."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from google.protobuf.message import Message

from outrider.gateway.request.answers import AnswerOptions, ResponsePlan
from outrider.gateway.tool_calls.plan import OutputPlan
from outrider.shared import wire
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import SessionSpec
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import Grammar, SamplingParams, SpeculationMode, ThinkingBudget
from outrider.shared.wire import from_message, to_message
from outrider.v1 import common_pb2, drafter_pb2, log_pb2, verifier_pb2
from tests.shared.wire.test_wire import through_bytes

SPEC = SessionSpec("id", 0, (1,), (), SamplingParams(), SpeculationMode.EXACT, stream_key=5)
MIRRORED: list[tuple[type[Any], type[Message]]] = [
    (Speculation, common_pb2.Speculation),
    (SamplingParams, common_pb2.SamplingParams),
    (ThinkingBudget, common_pb2.ThinkingBudget),
    (Grammar, common_pb2.Grammar),
    (AnswerOptions, log_pb2.AnswerOptions),
    (OutputPlan, log_pb2.OutputPlan),
    (ResponsePlan, log_pb2.ResponsePlan),
]


@pytest.mark.parametrize(("kind", "message"), MIRRORED)
def test_both_have_the_same_fields(kind: type[Any], message: type[Message]) -> None:
    assert {entry.name for entry in dataclasses.fields(kind)} == set(message.DESCRIPTOR.fields_by_name) - {"echo"}


def test_an_older_gateway_says_nothing_of_speculation() -> None:
    message = wire.open_drafter(SPEC).open
    message.ClearField("speculation")
    assert wire.spec_from_wire(through_bytes(message)).speculation == Speculation()


def test_fields_of_a_newer_version_are_passed_over() -> None:
    """Field 1000 of both messages, a varint, is none that this version knows."""
    newer = to_message(common_pb2.Speculation(), Speculation(method="ngram")).SerializeToString() + b"\xc0\x3e\x05"
    message = drafter_pb2.OpenDrafterSession()
    message.CopyFrom(wire.open_drafter(SPEC).open)
    message.speculation.ParseFromString(newer)
    assert wire.spec_from_wire(through_bytes(message)).speculation == Speculation(method="ngram")


@pytest.mark.parametrize(
    ("speculation", "param"),
    [
        (common_pb2.Speculation(num_speculative_tokens=-1), "speculation.num_speculative_tokens"),
        (common_pb2.Speculation(mode=common_pb2.SpeculationMode.ValueType(7)), "mode"),
    ],
)
def test_a_service_refuses_options_out_of_range(speculation: common_pb2.Speculation, param: str) -> None:
    message = verifier_pb2.OpenVerifierSession()
    message.CopyFrom(wire.open_verifier(SPEC).open)
    message.speculation.CopyFrom(speculation)
    with pytest.raises(InvalidRequest) as refused:
        wire.spec_from_wire(message)
    assert refused.value.param == param


def test_a_bool_that_is_off_stays_off_where_the_default_is_on() -> None:
    plan = OutputPlan(parallel=False, include_reasoning=False, marker_tokens=("<a>",))
    assert from_message(OutputPlan, through_bytes(to_message(log_pb2.OutputPlan(), plan))) == plan
