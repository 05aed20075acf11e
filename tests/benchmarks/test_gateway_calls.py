"""What benchmarks/gateway_calls counts: the gateway's own functions, under their files' real names."""

from __future__ import annotations

import json
import sys

from benchmarks.gateway_calls import CallCounter
from outrider.gateway.openai.fields import json_kind, string


def test_calls_are_counted_by_file_and_function_of_the_gateway_alone() -> None:
    counter = CallCounter()
    sys.setprofile(counter)
    for value in ("a", "b"):
        json_kind(string(value))
    json.dumps({})
    sys.setprofile(None)
    file = "gateway/openai/fields.py"
    assert counter.by_function() == {(file, "json_kind"): 2, (file, "string"): 2}
