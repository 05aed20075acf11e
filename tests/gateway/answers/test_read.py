"""Answers that `outrider verify` reads: whole ones, and streams of which a choice's events are put together."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from outrider.gateway.answers.read import read_answer
from outrider.shared.errors import InvalidRequest


def _events(*events: dict[str, Any]) -> str:
    return "".join(f"id: a:{place}\ndata: {json.dumps(event)}\n\n" for place, event in enumerate(events))


def test_choices_are_put_together_by_their_index() -> None:
    call = {"index": 0, "id": "call-1", "type": "function", "function": {"name": "note", "arguments": ""}}
    stream = _events(
        {"choices": [{"index": 1, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}]},
        {"choices": [{"index": 1, "delta": {"content": "Hel"}, "logprobs": {"content": [{"token": "Hel"}]}}]},
        {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}}]},
        {"choices": [{"index": 1, "delta": {"content": "lo"}, "logprobs": {"content": [{"token": "lo"}]}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]},
        {"choices": [{"index": 1, "delta": {}, "finish_reason": "stop"}]},
        {"choices": [], "object": "chat.completion.chunk", "receipt": {"version": 1}},
    )
    whole_call = {**call, "function": {"name": "note", "arguments": "{}"}}
    assert read_answer(f": a comment\r\n{stream}data: [DONE]\n\n", "stream") == {
        "object": "chat.completion.chunk",
        "receipt": {"version": 1},
        "choices": [
            {"index": 0, "delta": {"tool_calls": [whole_call]}, "finish_reason": "tool_calls"},
            {
                "index": 1,
                "delta": {"role": "assistant", "content": "Hello"},
                "finish_reason": "stop",
                "logprobs": {"content": [{"token": "Hel"}, {"token": "lo"}]},
            },
        ],
    }


def test_a_whole_answer_is_read_as_it_is() -> None:
    answer = {"choices": [{"index": 0, "text": "data: x"}], "receipt": None}
    assert read_answer(json.dumps(answer, indent=1), "file") == answer


@pytest.mark.parametrize(
    "text", ["", "data:", "data: 1", "data: [1]", "data: {", "data: [DONE]", "[]", "{", 'data: {"a": NaN}', "text"]
)
def test_what_is_neither_is_refused_by_name(text: str) -> None:
    with pytest.raises(InvalidRequest, match=r"answer\.txt"):
        read_answer(text, "answer.txt")


@pytest.mark.parametrize("choices", [None, 1, "a", [1], [None], [{}], [{"index": []}], {"index": 0}, [[]]])
def test_choices_of_any_kind_are_no_crash(choices: Any) -> None:
    good = {"choices": [{"index": 0, "text": "a", "logprobs": 1}]}
    read_answer(_events({"choices": choices}, good, {"choices": choices}), "stream")


def test_the_time_is_linear_in_the_events() -> None:
    """Each event with a choice and a member of its own, and one text of all events."""

    def seconds(count: int) -> float:
        text = _events(
            *({"choices": [{"index": 0, "text": "ab" * 20, f"m{k}": 1}, {"index": k + 1}]} for k in range(count))
        )
        started = time.process_time()
        read_answer(text, "stream")
        return time.process_time() - started

    seconds(1000)
    assert seconds(8_000) < 8 * 4 * seconds(1000) + 0.5
