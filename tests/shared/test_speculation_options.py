"""Every option of Speculation gets from every API to both services, whatever options there are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from outrider.client.api.params import generate_message
from outrider.gateway.openai.schema import CompletionRequest, parse_body
from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared
from outrider.gateway.request.record import SessionRecord, new_record
from outrider.gateway.request.types import ValidRequest
from outrider.offline.prompts import _body
from outrider.shared import sampling_params, wire
from outrider.shared.errors import InvalidRequest
from outrider.shared.messages import SessionSpec
from outrider.shared.request_params import SamplingParams, Speculation


def _example(entry: Any) -> Any:
    """A value that is not the default."""
    if entry.metadata["choices"]:
        return entry.metadata["choices"][-1]
    if entry.metadata["limits"] is not None:
        return entry.metadata["limits"][1]
    return {"str": "ngram", "bool | None": False}[entry.type]


EVERY = Speculation(**{entry.name: _example(entry) for entry in fields(Speculation)})


def _by_http(given: dict[str, Any]) -> Speculation:
    body = parse_body(CompletionRequest, {"prompt": "a", "speculation": given}).speculation
    assert body is not None
    options: Speculation = body.options()
    return options


def _by_client(given: dict[str, Any]) -> Speculation:
    message = generate_message("id", "a", SamplingParams(speculation=given))
    return wire.from_message(Speculation, message.speculation)


def _offline(given: dict[str, Any]) -> Speculation:
    return _by_http(_body(SamplingParams(extra_args={"speculation": given}))["speculation"])


def test_no_example_is_the_default() -> None:
    assert EVERY.given() == vars(EVERY)


@pytest.mark.parametrize("api", [_by_http, _by_client, _offline])
def test_every_option_comes_in(api: Callable[[dict[str, Any]], Speculation]) -> None:
    assert api(vars(EVERY)) == EVERY


@pytest.mark.parametrize("api", [_by_http, _by_client, _offline])
@pytest.mark.parametrize(
    "entry", [entry for entry in fields(Speculation) if entry.metadata["limits"]], ids=lambda entry: str(entry.name)
)
def test_no_api_takes_a_number_out_of_range(api: Callable[[dict[str, Any]], Speculation], entry: Any) -> None:
    for number in (entry.metadata["limits"][0] - 1, entry.metadata["limits"][1] + 1):
        with pytest.raises(InvalidRequest, match=entry.name) as refused:
            api({entry.name: number})
        assert refused.value.param == f"speculation.{entry.name}"


def test_every_option_is_in_the_record() -> None:
    request = ValidRequest("id", (1,), sampling_params.SamplingParams(), speculation=EVERY)
    record = new_record(AnswerKind.COMPLETION, Prepared((request,), AnswerOptions("id", 1, "model", chat=False)))
    assert SessionRecord.decode(record.encode()).prepared.requests[0].speculation == EVERY


def test_every_option_reaches_both_services() -> None:
    mode = sampling_params.SpeculationMode.EXACT
    spec = SessionSpec("id", 0, (1,), (), sampling_params.SamplingParams(), mode, stream_key=5, speculation=EVERY)
    assert wire.spec_from_wire(wire.open_verifier(spec).open).speculation == EVERY
    assert wire.spec_from_wire(wire.open_drafter(spec).open).speculation == EVERY
