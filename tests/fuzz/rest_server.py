"""Every operation of /openapi.json through schemathesis, and bodies that are no JSON or JSON that nobody meant.

An answer is well when it comes, is no 5xx but one on purpose (503: overloaded, 504: the request's own time limit), and,
from 400 on, is an error in OpenAI's shape, or Anthropic's. A connection that breaks is a finding.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import requests
import schemathesis
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode

from tests.fuzz.campaign import Target
from tests.fuzz.strange_bytes import corrupted
from tests.fuzz.tally import Finding
from tests.fuzz.victim import Victim

_ON_PURPOSE = (503, 504)
_HANG_S = 60.0
# A body that makes sense by chance may ask for a hundred choices of two thousand tokens.
_HEADERS = {"X-Request-Timeout": "0.3"}
_JSON = {**_HEADERS, "Content-Type": "application/json"}

_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.sampled_from([2**31, 2**53, 2**63, -(2**64), 10**30, 1e308, 1e-320, -0.0, 0.5, 1.5]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from(
        ["", "a", "stop", "json_object", "json_schema", "user", "auto", "draft_model", "\x00", "é", "\U0001f600"]
    ),
    st.text(max_size=10),
)
_KEYS = st.sampled_from(
    ["type", "schema", "json_schema", "role", "content", "regex", "choice", "grammar", "$ref", "1", ""]
)
_VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(_KEYS | st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
GOOD_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "import os",
        "max_tokens": 4,
        "temperature": 0,
        "stream": False,
        "logprobs": 2,
        "stop": ["\n\n"],
        "seed": 1,
        "logit_bias": {"5": 1.5},
        "stream_options": None,
        "structured_outputs": {"regex": "[a-z]+"},
        "speculation": {"method": "draft_model", "num_speculative_tokens": 3},
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "a"}],
        "max_completion_tokens": 4,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}},
        "stream": True,
        "stream_options": {"include_usage": True},
        "top_logprobs": 2,
        "logprobs": True,
        "n": 2,
        "tools": None,
    },
    "/v1/messages": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        "max_tokens": 4,
        "system": "b",
        "stream": True,
        "stop_sequences": ["x"],
        "tools": [],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "a"}], "tools": None},
    "/tokenize": {"prompt": "import os", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [40, 41, 42], "skip_special_tokens": False},
}


@st.composite
def changed_body(draw: st.DrawFn, good: dict[str, Any]) -> bytes:
    """A good body with some fields gone, some of another value, some that nobody knows; now and then broken bytes."""
    body = dict(good)
    for _ in range(draw(st.integers(1, 3))):
        key = draw(st.sampled_from([*good, "n", "user", "x"]))
        if draw(st.booleans()):
            body[key] = draw(_VALUES)
        else:
            body.pop(key, None)
    # Escaped or not: half a surrogate pair can be written in either way.
    text = json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass")
    return draw(corrupted(st.just(text))) if draw(st.integers(0, 3)) == 0 else text


@contextmanager
def rest_targets(victim: Victim) -> Iterator[list[Target[Any]]]:
    with requests.Session() as session, httpx.Client(base_url=victim.state.url, timeout=_HANG_S) as http:
        schema = schemathesis.openapi.from_dict(http.get("/openapi.json").json())
        operations: Any = schema.get_all_operations()  # typed as results that may be errors; ours is a right document
        yield [
            *(_operation(operation.ok(), session, victim) for operation in operations),
            *(_bodies(path, http, victim) for path in GOOD_BODIES),
        ]


def _operation(operation: Any, session: requests.Session, victim: Victim) -> Target[Any]:
    """Requests that follow the document, and requests that break it in one place."""
    cases = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if operation.body or operation.path_parameters:
        cases |= operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)

    def check(case: Case[Any]) -> list[str]:
        try:
            answer = case.call(victim.state.url, session=session, timeout=_HANG_S, headers=_HEADERS)
        except requests.RequestException as error:
            raise Finding(f"{type(error).__name__}: {error}") from error
        return [_outcome(answer.status_code, answer.headers.get("content-type", [""])[0], answer.content)]

    return Target(f"OpenAPI {operation.label}", cases, check, after_round=victim.check)


def _bodies(path: str, http: httpx.Client, victim: Victim) -> Target[Any]:
    def check(body: bytes) -> list[str]:
        try:
            answer = http.post(path, content=body, headers=_JSON)
        except httpx.HTTPError as error:
            raise Finding(f"{type(error).__name__}: {error}") from error
        return [_outcome(answer.status_code, answer.headers.get("content-type", ""), answer.content)]

    return Target(f"bodies of POST {path}", changed_body(GOOD_BODIES[path]), check, after_round=victim.check)


def _outcome(status: int, content_type: str, content: bytes) -> str:
    if status >= 500 and status not in _ON_PURPOSE:
        raise Finding(f"{status} {content[:300]!r}")
    if status >= 400:
        # HEAD has no body, and what is no HTTP never reaches the application.
        answer = json.loads(content) if content_type.startswith("application/json") else {"error": {}}
        fields = {"message", "type"} if answer.get("type") == "error" else {"message", "type", "param", "code"}
        if content and answer["error"].keys() != fields:
            raise Finding(f"{status} in another shape: {content[:300]!r}")
    elif content.startswith(b"data: ") or b"\ndata: " in content:
        return _stream_outcome(content)
    return str(status)


def _stream_outcome(content: bytes) -> str:
    """A stream says in its last event how it ended."""
    events = [line.removeprefix(b"data: ") for line in content.split(b"\n") if line.startswith(b"data: ")]
    for event in events:
        if event.startswith(b'{"error"'):
            code = json.loads(event)["error"]["code"]
            if code >= 500 and code not in _ON_PURPOSE:
                raise Finding(f"an event with {code}: {event[:300]!r}")
            return f"200, then {code}"
        if event.startswith(b'{"type":"error"'):
            kind = json.loads(event)["error"]["type"]
            if kind == "api_error":
                raise Finding(f"an event with {kind}: {event[:300]!r}")
            return f"200, then {kind}"
    if events[-1] not in (b"[DONE]", b'{"type":"message_stop"}'):
        raise Finding(f"a stream that just ends: {content[-300:]!r}")
    return "200"
