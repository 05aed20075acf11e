"""The REST server over HTTP: endpoints, bodies that are wrong, errors before and within a stream."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest
from gateway_script import Script, ScriptedService

from outrider.gateway.admission.readiness import ReadyState
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.http.app import Cors, create_app
from outrider.shared.errors import Overloaded, Unavailable, VerifierLost

JSON = {"content-type": "application/json"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 60},
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
}


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error, after its shape was checked."""
    body = response.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == response.status_code
    assert error["message"]
    assert "Traceback" not in error["message"]
    return error


# ---- endpoints --------------------------------------------------------------------------------------------------


async def test_models(http: httpx.AsyncClient) -> None:
    listed = (await http.get("/v1/models")).json()
    assert listed["object"] == "list"
    [card] = listed["data"]
    assert card == (await http.get("/v1/models/demo")).json()
    assert (card["id"], card["max_model_len"], card["created"]) == ("demo", 512, 1_700_000_000)
    assert card["draft_methods"] == ["ngram", "draft_model"]
    assert (card["chats"], card["tool_call_parser"]) == (True, "")
    missing = await http.get("/v1/models/org/other")
    assert missing.status_code == 404
    assert error_of(missing)["type"] == "not_found_error"


async def test_model_names_may_have_slashes(http: httpx.AsyncClient, service: ScriptedService) -> None:
    service.model = replace(service.model, name="org/model")
    assert (await http.get("/v1/models/org/model")).json()["id"] == "org/model"


@pytest.mark.parametrize("path", ["/ready", "/readyz"])
async def test_ready(http: httpx.AsyncClient, service: ScriptedService, path: str) -> None:
    assert (await http.get(path)).json() == {"ready": True}
    service.state = ReadyState(True, warning="nobody drafts")
    response = await http.get(path)
    assert (response.status_code, response.json()) == (200, {"ready": True, "warning": "nobody drafts"})
    service.state = ReadyState(False, "no verifier is there")
    response = await http.get(path)
    assert (response.status_code, response.json()) == (503, {"ready": False, "reason": "no verifier is there"})
    assert (await http.get("/health")).status_code == 200


async def test_small_endpoints(http: httpx.AsyncClient) -> None:
    assert (await http.get("/ping")).status_code == (await http.post("/ping")).status_code == 200
    assert (await http.get("/version")).json() == {"version": "1.2.3"}
    metrics = await http.get("/metrics")
    assert metrics.text == "# HELP outrider:up One.\n"
    assert metrics.headers["content-type"].startswith("text/plain; version=")


async def test_tokenize_and_detokenize(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    answer = (await http.post("/tokenize", json={"prompt": "Hello", "return_token_strs": True})).json()
    assert answer == {"count": 3, "max_model_len": 512, "tokens": [44, 339, 308], "token_strs": ["H", "el", "lo"]}
    chat = (await http.post("/tokenize", json={"messages": BODIES[CHAT]["messages"]})).json()
    assert chat["token_strs"] is None
    back = await http.post("/detokenize", json={"tokens": chat["tokens"]})
    assert back.json() == {"prompt": "<|user|>\nhi<|end|>\n<|assistant|>\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [4096]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_tokenize_refusals(http: httpx.AsyncClient, path: str, body: dict[str, Any], param: str) -> None:
    response = await http.post(path, json=body)
    assert response.status_code == (404 if param == "model" else 400)
    assert error_of(response)["param"] == param


async def test_invocations_are_completions_or_chats(http: httpx.AsyncClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
        own, invoked = [await http.post(at, json={**body, "max_tokens": 9}) for at in (path, "/invocations")]
        assert invoked.status_code == 200, invoked.text
        for name in ("object", "choices", "usage"):
            assert invoked.json()[name] == own.json()[name]
    refused = await http.post("/invocations", json={"input": "a"})
    assert (refused.status_code, error_of(refused)["param"]) == (400, "prompt")


async def test_routing_errors(http: httpx.AsyncClient) -> None:
    assert "no such endpoint: /v1/nothing" in error_of(await http.get("/v1/nothing"))["message"]
    wrong = await http.get(COMPLETIONS)
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")
    assert error_of(wrong)["message"] == "GET is not allowed on /v1/completions"
    assert (await http.post("/v1/completions/", json={})).status_code == 404


async def test_openapi_document(http: httpx.AsyncClient) -> None:
    document = (await http.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]

    def references(node: object) -> set[str]:
        if isinstance(node, dict):
            own = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
            return own.union(*(references(value) for value in node.values()))
        return set().union(*(references(value) for value in node)) if isinstance(node, list) else set()

    assert {name.rpartition("/")[2] for name in references(document)} <= schemas.keys()
    body = document["paths"][COMPLETIONS]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/CompletionRequest"}
    fields = schemas["CompletionRequest"]["properties"]
    assert {"prompt", "temperature", "speculation", "stream_options"} <= fields.keys()
    assert schemas["CompletionRequest"]["required"] == ["prompt"]
    assert "json" in schemas["StructuredOutputs"]["properties"]
    assert schemas["MessagesRequest"]["required"] == ["messages", "max_tokens"]
    assert {"tools", "thinking", "stop_sequences"} <= schemas["MessagesRequest"]["properties"].keys()
    refused = document["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]["schema"]
    assert refused == {"$ref": "#/components/schemas/MessagesErrorAnswer"}
    ids = [route["operationId"] for path in document["paths"].values() for route in path.values()]
    assert len(ids) == len(set(ids))


async def test_cors_is_off_until_origins_are_named(service: ScriptedService) -> None:
    headers = {"origin": "https://a.example"}
    for origins, expected in (((), None), (("https://a.example",), "https://a.example"), (("*",), "*")):
        transport = httpx.ASGITransport(app=create_app(service, cors=Cors(origins)))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers=headers)
            assert response.headers.get("access-control-allow-origin") == expected


async def test_a_browser_asks_before_it_calls(service: ScriptedService) -> None:
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    for cors, origin, allowed in (
        (Cors(), "https://a.example", None),
        (Cors(("https://a.example",)), "https://a.example", "https://a.example"),
        (Cors(("https://a.example",)), "https://b.example", None),
        (Cors(("*",), credentials=True), "https://b.example", "https://b.example"),
        (Cors(("*",), methods=("GET",)), "https://b.example", None),
    ):
        transport = httpx.ASGITransport(app=create_app(service, cors=cors))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = await client.options(COMPLETIONS, headers={"origin": origin, **asked})
            granted = answer.headers.get("access-control-allow-origin") if answer.status_code == 200 else None
            assert granted == allowed, (cors, origin)


async def begun(http: httpx.AsyncClient, path: str) -> None:
    response = await http.post(path, json={**BODIES[path], "stream": True, "request_id": "r"})
    assert response.status_code == 200


@pytest.mark.parametrize(
    ("path", "last_event_id", "status", "message"),
    [
        (COMPLETIONS, "cmpl-other:3", 404, "no request 'cmpl-other' is known here"),
        (COMPLETIONS, "chatcmpl-r:3", 404, "no request 'chatcmpl-r' is known here"),
        (CHAT, "cmpl-r:3", 404, "no request 'cmpl-r' is known here"),
        ("/v1/streams/cmpl-other", "", 404, "no request 'cmpl-other' is known here"),
        ("/v1/streams/cmpl-r", "cmpl-other:3", 400, "does not belong to the request in the path"),
        (COMPLETIONS, "17", 400, "not the id of an event of this server"),
        (COMPLETIONS, "cmpl-r:", 400, "not the id of an event of this server"),
        (COMPLETIONS, ":3", 400, "not the id of an event of this server"),
        (COMPLETIONS, "cmpl-r:3.x", 400, "not the id of an event of this server"),
        (COMPLETIONS, "cmpl-r:-1", 400, "not the id of an event of this server"),
        (COMPLETIONS, "cmpl-r:99999999999", 400, "not the id of an event of this server"),
        (COMPLETIONS, "cmpl-r:1$f", 400, "not the id of an event of this server"),
    ],
)
async def test_resumes_that_are_refused(
    http: httpx.AsyncClient, service: ScriptedService, path: str, last_event_id: str, status: int, message: str
) -> None:
    await begun(http, COMPLETIONS)
    await begun(http, CHAT)
    num_opened = service.num_opened
    method = "GET" if path.startswith("/v1/streams") else "POST"
    response = await http.request(method, path, headers={"last-event-id": last_event_id})
    assert response.status_code == status
    assert message in error_of(response)["message"]
    assert service.num_opened == num_opened


async def test_an_empty_last_event_id_is_none(http: httpx.AsyncClient, service: ScriptedService) -> None:
    response = await http.post(COMPLETIONS, json=BODIES[COMPLETIONS], headers={"last-event-id": ""})
    assert response.status_code == 200
    assert not service.wanted


# ---- bodies that are wrong --------------------------------------------------------------------------------------

DEEP = b"[" * 100_000 + b"]" * 100_000
WRONG_BODIES: list[tuple[str, bytes, int, str]] = [
    ("empty", b"", 400, "the body is not JSON: Expecting value at line 1 column 1"),
    ("half", b'{"prompt": "a"', 400, "the body is not JSON: Expecting"),
    ("trailing", b'{"prompt": "a"} x', 400, "the body is not JSON: Extra data"),
    ("list", b'["prompt"]', 400, "the body must be an object, got a list"),
    ("text", b'"prompt"', 400, "the body must be an object, got a string"),
    ("null", b"null", 400, "the body must be an object, got null"),
    ("invalid utf-8", b'{"prompt": "\xff\xfe"}', 400, "the body is not UTF-8: invalid byte at offset 12"),
    ("utf-16", '{"prompt": "a"}'.encode("utf-16"), 400, "the body is not UTF-8"),
    ("surrogate", rb'{"prompt": "\ud83d"}', 400, "a lone surrogate"),
    ("surrogate in a stop", rb'{"prompt": "a", "stop": ["\uDFFF x"]}', 400, "a lone surrogate"),
    ("NaN", b'{"prompt": "a", "temperature": NaN}', 400, "the body has NaN"),
    ("Infinity", b'{"prompt": "a", "top_p": -Infinity}', 400, "the body has -Infinity"),
    ("1e999", b'{"prompt": "a", "top_p": 1e999}', 400, "the body has 1e999, which is beyond the range"),
    ("digits", b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", 400, "too many digits"),
    ("huge", b'{"prompt": "a", "max_tokens": 99999999999999999999999}', 400, "max_tokens must be a 64-bit number"),
    ("deep", DEEP, 400, "nested too deeply"),
    ("deep in a field", b'{"prompt": "a", "metadata": ' + DEEP + b"}", 400, "nested too deeply"),
    ("10 MB", b'{"prompt": "' + b"a" * 10_000_000 + b'"}', 413, "exceeds the limit of 4194304 bytes"),
    ("long prompt", b'{"prompt": "' + b"a" * 200_000 + b'"}', 400, "exceeds the model's context of 512 tokens"),
    ("many ids", b'{"prompt": [' + b"5," * 500_000 + b"5]}", 400, "prompt has 500001 tokens"),
    ("control character", b'{"prompt": "a\x00"}', 400, "Invalid control character"),
    ("empty prompt", b'{"prompt": ""}', 400, "prompt is empty"),
    ("no prompt", b"{}", 400, "prompt is required"),
    ("n", b'{"prompt": "a", "n": 1000000}', 400, "n must be between 1 and 128"),
    ("model", b'{"prompt": "a", "model": "gpt-5"}', 404, "'gpt-5' is not served"),
    ("method", b'{"prompt": "a", "speculation": {"method": "x"}}', 400, "not one of auto, off, ngram, draft_model"),
]


@pytest.mark.parametrize(
    ("body", "status", "message"), [row[1:] for row in WRONG_BODIES], ids=[row[0] for row in WRONG_BODIES]
)
async def test_wrong_bodies(
    http: httpx.AsyncClient, service: ScriptedService, body: bytes, status: int, message: str
) -> None:
    response = await http.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == status
    assert message in error_of(response)["message"]
    assert service.num_opened == 0


async def test_surrogate_pairs_are_text(http: httpx.AsyncClient, service: ScriptedService) -> None:
    response = await http.post(COMPLETIONS, content=rb'{"prompt": "\ud83d\ude00"}', headers=JSON)
    assert response.status_code == 200
    assert service.tokenizer.decode(service.requests[0].prompt_token_ids) == "😀"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
async def test_wrong_content_type(http: httpx.AsyncClient, content_type: str | None) -> None:
    headers = {"content-type": content_type} if content_type is not None else {}
    response = await http.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert response.status_code == 400
    assert "Content-Type must be application/json" in error_of(response)["message"]


async def test_the_limit_holds_while_reading(http: httpx.AsyncClient, service: ScriptedService) -> None:
    """Without a Content-Length the reader must stop by itself."""
    num_sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield b" " * 65536

    response = await http.post(COMPLETIONS, content=endless(), headers=JSON)
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    assert num_sent <= 9 * service.limits.max_body_bytes // 65536 + 2  # the limit, and eight times it thrown away


# ---- errors of the generation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("too many requests wait"), 429, "rate_limit_error"),
        (Unavailable("no verifier is there"), 503, "service_unavailable_error"),
    ],
)
async def test_errors_before_the_first_token_are_a_status(
    http: httpx.AsyncClient,
    service: ScriptedService,
    path: str,
    stream: bool,
    error: Exception,
    status: int,
    kind: str,
) -> None:
    service.script.error = error
    response = await http.post(path, json={**BODIES[path], "stream": stream})
    assert response.status_code == status
    assert (error_of(response)["type"], error_of(response)["message"]) == (kind, str(error))
    assert response.headers.get("retry-after") == ("1" if status in (429, 503) else None)
    assert service.num_open == 0


@pytest.mark.parametrize("prompt", ["x", ["x", "y", "z"]])
async def test_an_error_within_a_stream_is_an_event(
    http: httpx.AsyncClient, service: ScriptedService, prompt: Any
) -> None:
    service.script = Script(error=VerifierLost("the verifier is gone"), error_at=2)
    response = await http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 60, "stream": True})
    assert response.status_code == 200
    events = response.text.strip().split("\n\n")
    assert json.loads(events[-1].removeprefix("data: "))["error"] == {
        "message": "the verifier is gone",
        "type": "service_unavailable_error",
        "param": None,
        "code": 503,
    }
    assert "[DONE]" not in response.text
    assert service.num_open == 0


async def test_an_error_of_one_prompt_ends_the_request(http: httpx.AsyncClient, service: ScriptedService) -> None:
    service.script = Script(error=VerifierLost("the verifier is gone"), error_at=2)
    response = await http.post(COMPLETIONS, json={"prompt": ["x", "y"], "max_tokens": 60})
    assert response.status_code == 503
    assert (service.num_opened, service.num_open) == (2, 0)


@pytest.mark.parametrize("error", [KeyError("secret detail"), ConnectionResetError("secret detail")])
@pytest.mark.parametrize("stream", [False, True])
async def test_unexpected_errors_have_a_reference(
    http: httpx.AsyncClient,
    service: ScriptedService,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
    stream: bool,
) -> None:
    service.script = Script(error=error)
    response = await http.post(COMPLETIONS, json={"prompt": "x", "stream": stream})
    assert response.status_code == 500
    message = error_of(response)["message"]
    assert "secret" not in message
    reference = message.rpartition(" ")[2]
    [record] = [record for record in caplog.records if reference in record.getMessage()]
    assert record.levelno == logging.ERROR
    assert record.exc_info is not None
    assert record.exc_info[1] is error


@pytest.mark.parametrize("prompt", ["x", ["x", "y"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_output_that_ends_early_is_an_error(
    http: httpx.AsyncClient, service: ScriptedService, stream: bool, prompt: Any
) -> None:
    service.script = Script(ends_early=True)
    response = await http.post(COMPLETIONS, json={"prompt": prompt, "stream": stream})
    assert response.status_code == (200 if stream else 500)
    assert "internal error" in response.text
    assert "[DONE]" not in response.text


async def test_a_model_that_is_not_known_yet(service: ScriptedService) -> None:
    class NotYet(ScriptedService):
        def __getattribute__(self, name: str) -> Any:
            if name == "model":
                raise Unavailable("no verifier has been reached yet")
            return super().__getattribute__(name)

    transport = httpx.ASGITransport(app=create_app(NotYet(service.tokenizer)))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        for response in (await client.get("/v1/models"), await client.post(COMPLETIONS, json={"prompt": "x"})):
            assert response.status_code == 503
            assert error_of(response)["message"] == "no verifier has been reached yet"


@pytest.mark.parametrize("name", ["bad_words", "logit_bias"])
async def test_long_lists_for_many_outputs_are_refused(http: httpx.AsyncClient, name: str) -> None:
    """Every output sends them to its verifier: 60 such requests kept all streams waiting for over a minute."""
    lists = {
        "bad_words": [f"w{number}" for number in range(1024)],
        "logit_bias": {str(token_id): -1.0 for token_id in range(4000)},
    }
    body = {"prompt": [[5]] * 60, "max_tokens": 1, name: lists[name]}
    refused = await http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == name
    assert (await http.post("/v1/completions", json={**body, "prompt": [5]})).status_code == 200
