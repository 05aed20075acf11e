"""Receipts are read back as they were written, and what is none is refused by name."""

from __future__ import annotations

import base64
import dataclasses
import json
from typing import Any

import pytest

from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared
from outrider.gateway.request.record import new_record
from outrider.gateway.request.types import ChoiceStart, ValidRequest
from outrider.offline.generation import NoLog
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import SamplingParams, SpeculationMode

OPTIONS = AnswerOptions("cmpl-1", 0, "demo", chat=False, receipt=True)
NUMERICS = "bfloat16/cpu/cpu/tp1/aa"


def _receipt(**params: Any) -> Receipt:
    sampling = SamplingParams(**{"temperature": 0.8, "seed": 3, **params})
    request = ValidRequest("cmpl-1", (5, 6), sampling, n=2, owner="alice", cache_salt="salt")
    record = new_record(AnswerKind.COMPLETION, Prepared((request,), OPTIONS), NUMERICS)
    starts = tuple(
        ChoiceStart(place, record.modes[0], key, NoLog(), numerics=NUMERICS)
        for place, key in enumerate(record.stream_keys[0])
    )
    prepared = Prepared((dataclasses.replace(request, starts=starts),), OPTIONS)
    return Receipt.of(prepared, ((1, 2), (3,)))


def test_a_receipt_is_read_back_without_what_is_the_callers_own() -> None:
    receipt = _receipt()
    body = json.loads(json.dumps(receipt.body()))
    assert Receipt.parse(body) == receipt
    data = base64.b64decode(body["request"])
    assert b"alice" not in data
    assert b"salt" not in data
    assert body["numerics"] == NUMERICS


def test_noise_of_another_seed_is_seen() -> None:
    receipt = _receipt()
    assert receipt.unseeded_choice() is None
    keys = receipt.record.stream_keys[0]
    swapped = dataclasses.replace(receipt.record, stream_keys=((keys[0], keys[0]),))
    assert dataclasses.replace(receipt, record=swapped).unseeded_choice() == 1


def test_only_exact_answers_have_a_receipt_that_can_be_read() -> None:
    receipt = _receipt()
    record = dataclasses.replace(receipt.record, modes=(SpeculationMode.REJECTION,))
    with pytest.raises(InvalidRequest, match="only exact answers"):
        Receipt.parse(dict(dataclasses.replace(receipt, record=record).body()))


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"request": None},
        {"request": "not base64"},
        {"request": "AAAA"},
        {"token_ids": None},
        {"token_ids": [[1, 2]]},
        {"token_ids": [[1, 2], []]},
        {"token_ids": [[1, 2], [-1]]},
        {"token_ids": [[1, 2], [True]]},
        {"token_ids": [[1, 2], ["3"]]},
    ],
)
def test_what_is_no_receipt_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="receipt"):
        Receipt.parse({**_receipt().body(), **changes})


@pytest.mark.parametrize("body", [None, [], "", 1, {}])
def test_nothing_is_no_receipt(body: object) -> None:
    with pytest.raises(InvalidRequest, match="receipt"):
        Receipt.parse(body)


def test_prompts_with_unequal_numbers_of_choices_are_refused() -> None:
    """A choice's place follows from the first prompt's number: the third would be in no prompt."""
    receipt = _receipt()
    record = receipt.record
    prepared = Prepared(record.prepared.requests * 2, OPTIONS)
    keys = record.stream_keys[0]
    broken = dataclasses.replace(record, prepared=prepared, modes=record.modes * 2, stream_keys=(keys[:1], keys))
    with pytest.raises(InvalidRequest, match="differ in their number of choices"):
        Receipt.parse(dict(Receipt(broken, ((1,), (2,), (3,))).body()))
