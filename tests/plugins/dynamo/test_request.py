"""What Dynamo 1.6.1 sends, as a body of /v1/completions that the gateway's schema takes, and events as chunks."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from outrider.gateway.openai.schema import CompletionRequest, parse_body
from outrider.plugins.dynamo.request import Chunks, completion
from outrider.shared.errors import CommitRefused, InternalError, InvalidRequest

ID = "0190a1b2-0000-4000-8000-000000000002"
# As its frontend sent it for a completion with these fields.
REQUEST: dict[str, Any] = {
    "model": "demo",
    "token_ids": [313, 2746, 906],
    "stop_conditions": {
        "max_tokens": 20,
        "stop": None,
        "stop_token_ids": None,
        "stop_token_ids_visible": None,
        "stop_token_ids_hidden": [0, 4],
        "min_tokens": 3,
        "ignore_eos": None,
        "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": None,
        "best_of": None,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.20000000298023224,
        "repetition_penalty": 1.100000023841858,
        "temperature": 1.0,
        "top_p": 0.8999999761581421,
        "top_k": 5,
        "min_p": 0.10000000149011612,
        "use_beam_search": None,
        "length_penalty": None,
        "seed": 7,
        "include_stop_str_in_output": None,
        "guided_decoding": {"regex": "[ab]+"},
    },
    "output_options": {"logprobs": 2, "prompt_logprobs": None, "skip_special_tokens": None},
    "eos_token_ids": [0, 4],
    "routing": {"cache_salt": "x"},
    "extra_args": {"nvext": {"cache_salt": "x"}},
}


def changed(path: str, value: Any) -> dict[str, Any]:
    request = copy.deepcopy(REQUEST)
    *holders, name = path.split(".")
    holder = request
    for part in holders:
        holder = holder[part]
    holder[name] = value
    return request


def body_of(request: dict[str, Any], dynamo_id: str = ID) -> dict[str, Any]:
    return completion(request, dynamo_id, "demo", 512)


def opening(prompt: list[int]) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "", "token_ids": [], "prompt_token_ids": prompt, "finish_reason": None}]}


def event(token_ids: list[int], finish: str | None = None, **fields: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": "?", "token_ids": token_ids, "finish_reason": finish, **fields}]}


def chunks_of(chunks: Chunks, *events: dict[str, Any]) -> list[dict[str, Any]]:
    return [chunk for one in events for chunk in chunks.of(one)]


def test_a_body_says_what_dynamo_s_request_says() -> None:
    parsed = parse_body(CompletionRequest, body_of(REQUEST))
    assert parsed.prompt == ((313, 2746, 906),)
    expected = {
        "temperature": 1.0,
        "top_k": 5,
        "seed": 7,
        "max_tokens": 20,
        "min_tokens": 3,
        "logprobs": 2,
        "presence_penalty": 0.5,
        "stop_token_ids": (0, 4),
        "cache_salt": "x",
        "stream": True,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "n": 1,
        "ignore_eos": False,
    }
    assert {name: getattr(parsed, name) for name in expected} == expected
    assert (parsed.top_p, parsed.min_p) == pytest.approx((0.9, 0.1))
    assert parsed.structured_outputs is not None
    assert parsed.structured_outputs.regex == "[ab]+"


def test_without_max_tokens_there_is_the_room_of_the_context() -> None:
    assert body_of(changed("stop_conditions.max_tokens", None))["max_tokens"] == 512 - 3


def test_what_is_left_out_is_the_gateway_s_default() -> None:
    body = body_of(changed("sampling_options", None))
    assert not {"temperature", "top_p", "seed", "structured_outputs"} & body.keys()


def test_a_request_has_one_id_at_every_worker_and_no_other_has_it() -> None:
    retried = changed("token_ids", [313, 2746, 906, 5, 6])
    retried["stop_conditions"]["max_tokens"] = 18
    assert body_of(retried)["request_id"] == body_of(REQUEST)["request_id"]
    others = [
        body_of(changed("sampling_options.seed", 8)),
        body_of(changed("token_ids", [314, 2746, 906])),
        body_of(changed("sampling_options.guided_decoding", None)),
        body_of(REQUEST, "0190a1b2-0000-4000-8000-000000000003"),
    ]
    assert len({body["request_id"] for body in [*others, body_of(REQUEST)]}) == 5


@pytest.mark.parametrize(
    ("path", "value", "param"),
    [
        ("multi_modal_data", {"image_url": [{"Url": "http://x"}]}, "multi_modal_data"),
        ("prefill_result", {"disaggregated_params": {}}, "prefill_result"),
        ("stop_conditions.max_thinking_tokens", 5, "max_thinking_tokens"),
        ("sampling_options", [1], "sampling_options"),
        ("sampling_options.n", 2, "n"),
        ("sampling_options.guided_decoding", "x", "guided_decoding"),
        ("token_ids", {"a": 1}, "token_ids"),
        ("token_ids", 7, "token_ids"),
        ("stop_conditions.stop_token_ids", 5, "stop_token_ids"),
    ],
)
def test_what_cannot_be_served_is_named(path: str, value: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        body_of(changed(path, value))
    assert refused.value.param == param


def test_chunks_of_a_new_request() -> None:
    logprobs = {
        "tokens": ["token_id:5", "token_id:6"],
        "token_logprobs": [-0.5, -1.5],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -0.25}, None],
    }
    events = [opening([1, 2, 3]), event([5, 6], logprobs=logprobs), event([7], "stop")]
    usage = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    top = [{"rank": 1, "token_id": 9, "logprob": -0.25}, {"rank": 2, "token_id": 5, "logprob": -0.5}]
    assert chunks_of(Chunks([1, 2, 3]), *events) == [
        {"token_ids": [5, 6], "index": 0, "log_probs": [-0.5, -1.5], "top_logprobs": [top, []]},
        {"token_ids": [7], "index": 0, "finish_reason": "stop", "completion_usage": usage},
    ]


@pytest.mark.parametrize("num_known", range(7))
def test_a_migrated_request_gets_what_its_frontend_lacks(num_known: int) -> None:
    output = [5, 6, 7, 8, 9, 10]
    events = [opening([1, 2, 3]), event(output[:2]), event(output[2:5]), event(output[5:], "length")]
    chunks = chunks_of(Chunks([1, 2, 3, *output[:num_known]]), *events)
    assert [token_id for chunk in chunks for token_id in chunk["token_ids"]] == output[num_known:]
    assert chunks[-1]["finish_reason"] == "length"
    assert chunks[-1]["completion_usage"] == {"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}


@pytest.mark.parametrize(
    "events",
    [
        [opening([1, 2, 4])],
        [opening([1, 2, 3, 5, 6, 7])],
        [opening([1, 2, 3]), event([5, 7])],
        [opening([1, 2, 3]), event([5], "stop")],
    ],
)
def test_a_log_that_is_not_this_request_s_is_refused(events: list[dict[str, Any]]) -> None:
    with pytest.raises(CommitRefused):
        chunks_of(Chunks([1, 2, 3, 5, 6]), *events)


@pytest.mark.parametrize(
    "damaged",
    [
        {},
        {"choices": None},
        {"choices": [7]},
        {"choices": [{"index": "0", "token_ids": []}]},
        event([-1]),
        event([2**31]),
        event([True]),
        event(["5"]),  # type: ignore[list-item]
        event(7),  # type: ignore[arg-type]
        event([5], logprobs={"top_logprobs": [{"five": 0.0}], "token_logprobs": [0.0]}),
        event([5], logprobs=[]),
        event([5], logprobs={"top_logprobs": [{"token_id:5": "x", "token_id:6": 0.0}], "token_logprobs": [0.0]}),
    ],
)
def test_an_event_that_no_gateway_sends_is_an_error_of_that_request(damaged: dict[str, Any]) -> None:
    with pytest.raises(InternalError):
        chunks_of(Chunks([1]), damaged)
