"""The attacks: requests that the API takes, or refuses by name, and that cost the sender little.

Sizes are just below the limits that the gateway states, so that most of them are served.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    path: str
    body: bytes


def json_request(path: str, **body: Any) -> Request:
    return Request(path, json.dumps(body).encode())


def _two_more_streams() -> list[Request]:
    """No attack: what two more of the same cost, to compare with."""
    return [_completion(prompt="Hello there") for _ in range(2)]


def _rows_that_cost() -> list[Request]:
    """Every token of these two is drawn under 1,024 bad words and 4,096 biases."""
    bias = {str(token_id): -0.01 for token_id in range(4096)}
    return [_completion(prompt="Hello there", bad_words=_BAD_WORDS, logit_bias=bias) for _ in range(2)]


def _grammars() -> list[Request]:
    """Ten automata of a million states, each another one, and an ambiguous grammar, twice."""
    schemas = [{"type": "integer", "multipleOf": 1_000_003 + index} for index in range(10)]
    ambiguous = 'start: s\ns: s s | s s s | "a"'
    return [
        *(
            json_request(
                "/v1/chat/completions",
                messages=[{"role": "user", "content": "x"}],
                max_tokens=50,
                response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
            )
            for schema in schemas
        ),
        *(
            json_request("/v1/completions", prompt="a", max_tokens=400, structured_outputs={"grammar": ambiguous})
            for _ in range(2)
        ),
    ]


def _records() -> list[Request]:
    """30 bodies of 17 prompts; each leaves a record with 1,024 bad words, 7,288 tokens, for every prompt in Redis."""
    return [json_request("/v1/completions", prompt=[[5]] * 17, max_tokens=1, bad_words=_BAD_WORDS) for _ in range(30)]


def _long_texts() -> list[Request]:
    """Twelve times 4 MB to be tokenized, with the tokens' texts in the reply."""
    return [json_request("/tokenize", prompt="word ex 12 " * 370_000, return_token_strs=True) for _ in range(12)]


def _completion(**fields: Any) -> Request:
    return json_request("/v1/completions", max_tokens=120, temperature=0, ignore_eos=True, **fields)


_BAD_WORDS = [f"w{index}" for index in range(1024)]
CONTROL = "two more streams"
ATTACKS: dict[str, Callable[[], list[Request]]] = {
    CONTROL: _two_more_streams,
    "rows that cost": _rows_that_cost,
    "grammars": _grammars,
    "records": _records,
    "long texts": _long_texts,
}
