"""Asking for completions and chats over HTTP, whole and streamed.

The TypedDicts that document the answers are the schema here: pydantic checks every body and every event against them.
"""

from __future__ import annotations

import json
from typing import Any

import httpx
from pydantic import ConfigDict, TypeAdapter, with_config

from outrider.gateway.openai.answer_types import ChatCompletion, ChatCompletionChunk, Completion

TEXT = "Paris is the capital 漢字 👩‍👩‍👧 of France."
USER = [{"role": "user", "content": "hi"}]
STRICT = ConfigDict(extra="forbid", strict=True)
SCHEMAS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(with_config(STRICT)(kind)) for kind in (Completion, ChatCompletion, ChatCompletionChunk)
}


async def whole(http: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    chat = "messages" in body
    response = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    SCHEMAS["ChatCompletion" if chat else "Completion"].validate_json(response.text)
    answer: dict[str, Any] = response.json()
    return answer


async def streamed(http: httpx.AsyncClient, **body: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """All events' JSON, and the cursors in their ids."""
    chat = "messages" in body
    body = {**body, "stream": True}
    response = await http.post("/v1/chat/completions" if chat else "/v1/completions", json=body)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    events, ids = [], []
    for block in blocks[:-2]:
        id_line, line = [line for line in block.split("\n") if not line.startswith(":")]
        ids.append(id_line.rpartition(":")[2])
        data = line.removeprefix("data: ")
        assert id_line == f"id: {json.loads(data)['id']}:{ids[-1]}"
        SCHEMAS["ChatCompletionChunk" if chat else "Completion"].validate_json(data)
        events.append(json.loads(data))
    return events, ids


def joined(events: list[dict[str, Any]], index: int = 0) -> dict[str, Any]:
    """One choice put together again from its events."""
    choices = [choice for event in events for choice in event["choices"] if choice["index"] == index]
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    result = {"text": text, **{name: choices[-1][name] for name in ("finish_reason", "stop_reason")}}
    for name in ("token_ids",):
        result[name] = [value for choice in choices for value in choice.get(name, [])]
    for name in ("origins", "token_texts"):
        result[name] = [value for choice in choices for value in choice.get("outrider", {}).get(name, [])]
    return result
