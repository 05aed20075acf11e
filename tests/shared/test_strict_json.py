"""JSON from outside: what is read can be written again, and all else is refused by the name of its field."""

from __future__ import annotations

import json

import pytest

from outrider.shared.errors import InvalidRequest
from outrider.shared.strict_json import MAX_DEPTH, strict_json


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"a": NaN}', "NaN, which is not JSON"),
        ('{"a": -Infinity}', "-Infinity, which is not JSON"),
        ('{"a": [1e999]}', "1e999, which is beyond the range"),
        ('{"a": -1' + "0" * 400 + ".5}", "beyond the range"),
        ('{"a": ' + "9" * 5_000 + "}", "too many digits"),
        ('"\\ud83d"', "a lone surrogate"),
        ('{"\\udfff": 1}', "a lone surrogate"),
        ('{"a": "x\ny"}', "is not JSON: Invalid control character"),
        ("[" * 100_000, "nested too deeply"),
        ('{"a":' * (MAX_DEPTH + 1) + "1" + "}" * (MAX_DEPTH + 1), "nested too deeply"),
        ("", "is not JSON"),
        ("{} x", "is not JSON: Extra data"),
    ],
)
def test_what_is_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match="^the field .*" + reason.replace("+", r"\+")) as raised:
        strict_json(text, "the field", "field")
    assert raised.value.param == "field"


@pytest.mark.parametrize(
    "text",
    ['"\\ud83d\\ude00"', '{"a": [1, 1.5e300, -0.0, null, true]}', "[" * MAX_DEPTH + "]" * MAX_DEPTH, "[{},{}]" * 1],
)
def test_what_is_read(text: str) -> None:
    assert strict_json(text, "the field") == json.loads(text)


def test_many_brackets_are_not_deep() -> None:
    text = json.dumps([[{"a": []}]] * 10_000)
    assert strict_json(text, "the field") == json.loads(text)
