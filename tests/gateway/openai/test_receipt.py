"""Receipts are read back as they were written, what is none is refused by name, streams end with them; signatures."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from gateway_script import ScriptedService

from outrider.gateway.openai.receipt import Receipt
from outrider.gateway.openai.receipt_signature import ReceiptKey, load_public_key, signature_fault
from outrider.gateway.request.answers import AnswerKind, AnswerOptions, Prepared
from outrider.gateway.request.record import new_record
from outrider.gateway.request.types import ChoiceStart, NoLog, ValidRequest
from outrider.shared.errors import ConfigError, InvalidRequest
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from tests.gateway.openai.answers import joined, streamed, whole

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


async def test_a_stream_ends_with_the_receipt_of_all_its_tokens(http: httpx.AsyncClient) -> None:
    """From any event on, too, the rest is byte for byte what followed, the receipt included."""
    body = {"prompt": "Hello", "n": 2, "max_tokens": 40, "temperature": 0, "return_token_ids": True, "receipt": True}
    events, _ = await streamed(http, **body)
    receipt = Receipt.parse(events[-1]["receipt"])
    assert events[-1]["choices"] == []
    assert "usage" not in events[-1]
    assert receipt.token_ids == tuple(tuple(joined(events, index)["token_ids"]) for index in range(2))
    blocks = (await http.post("/v1/completions", json={**body, "stream": True})).text.split("\n\n")
    ids = [block.split("\n")[0].removeprefix("id: ") for block in blocks if block.startswith("id:")]
    for place, event_id in enumerate(ids):
        rest = await http.post("/v1/completions", headers={"last-event-id": event_id})
        assert rest.text.split("\n\n") == blocks[place + 1 :]


def _key_file(folder: Path, key: Any) -> Path:
    file = folder / "key.pem"
    file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return file


@pytest.mark.parametrize("stream", [False, True])
async def test_a_gateways_key_signs_its_receipts(
    http: httpx.AsyncClient, service: ScriptedService, tmp_path: Path, stream: bool
) -> None:
    key, other = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    body = {"prompt": "Hello", "max_tokens": 9, "temperature": 0, "receipt": True}
    unsigned = (await whole(http, **body))["receipt"]
    assert signature_fault(unsigned, key.public_key()) == "the receipt is not signed"
    service.receipt_key = ReceiptKey.load(str(_key_file(tmp_path, key)), "receipt-key")
    signed = (await streamed(http, **body))[0][-1]["receipt"] if stream else (await whole(http, **body))["receipt"]
    # What the module says, done by hand.
    rest = {name: value for name, value in signed.items() if name != "signature"}
    message = b"outrider receipt " + json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()
    key.public_key().verify(base64.b64decode(signed["signature"]), message)
    der = key.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert signed["key_id"] == hashlib.sha256(der).hexdigest()
    assert signature_fault(signed, key.public_key()) == ""
    assert "is signed by key" in signature_fault(signed, other.public_key())
    forged = {
        **signed,
        "key_id": hashlib.sha256(
            other.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        ).hexdigest(),
    }
    assert signature_fault(forged, other.public_key()) == "the receipt's signature is false"
    for changes in ({"numerics": "other"}, {"token_ids": [[1]]}, {"request": "AAAA"}, {"signature": "?"}, {"more": 1}):
        assert signature_fault({**signed, **changes}, key.public_key()) == "the receipt's signature is false"


def test_other_files_are_refused_as_keys_by_name(tmp_path: Path) -> None:
    curve = _key_file(tmp_path, ec.generate_private_key(ec.SECP256R1()))
    (tmp_path / "text").write_text("no key")
    locked = tmp_path / "locked.pem"
    key = Ed25519PrivateKey.generate()
    locked.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"word")))
    for file in (curve, tmp_path / "text", locked, tmp_path / "missing"):
        with pytest.raises(ConfigError, match=f"--receipt-key: {file}"):
            ReceiptKey.load(str(file), "receipt-key")
        with pytest.raises(ConfigError, match=f"--public-key: {file}"):
            load_public_key(file, "public-key")
