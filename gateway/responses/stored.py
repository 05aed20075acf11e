"""The stored form of a response, and the answers of the routes on a stored one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.gateway.openai.answer_body import to_json
from outrider.gateway.request.answers import Prepared, ResponsePlan
from outrider.gateway.responses.input_items import REFERENCE, Item, parse_items
from outrider.gateway.responses.response_types import ItemList, ResponseBody
from outrider.gateway.responses.store import ResponseStore
from outrider.shared.errors import InvalidRequest

# items of one page; OpenAI's
_DEFAULT_PAGE, _MAX_PAGE = 20, 100
# hexadecimal digits of an item's id
_ID_DIGITS = 24
_ID_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "additional_tools": "at",
}


async def keep(store: ResponseStore | None, prepared: Prepared, body: ResponseBody) -> None:
    """Stores a finished response if its request says so. Raises Unavailable."""
    plan = prepared.options.response
    if store is None or plan is None or not plan.input_items:
        return
    owner, response_id = prepared.requests[0].owner, prepared.options.answer_id
    if await store.put(owner, response_id, document_of(body, plan), plan.num_stored_bytes):
        await store.put_items(owner, {item["id"]: to_json(item).encode() for item in body["output"]})
    if plan.is_background:
        await store.forget_running(owner, response_id)


def document_of(body: ResponseBody, plan: ResponsePlan) -> bytes:
    return f'{{"response":{to_json(body)},"input":{plan.input_items}}}'.encode()


def is_running(document: bytes) -> bool:
    return stored_response(document)["status"] == "in_progress"


async def cancel(store: ResponseStore, owner: str, response_id: str) -> ResponseBody:
    """Cancels a running response and returns its body; one that has ended stays as it is.

    Raises InvalidRequest, UnknownSession or Unavailable.
    """
    document = await store.get(owner, response_id)
    body = stored_response(document)
    if not body["background"]:
        raise InvalidRequest(
            "Cannot cancel a synchronous response: it ends with its connection",
            param="response_id",
        )
    return await end(store, owner, document, {"status": "cancelled"}) if is_running(document) else body


async def delete(store: ResponseStore, owner: str, response_id: str) -> None:
    """Raises UnknownSession or Unavailable."""
    document = await store.delete(owner, response_id)
    if document:
        await store.forget_items(owner, [item["id"] for item in stored_response(document)["output"]])


async def end(store: ResponseStore, owner: str, document: bytes, changes: Mapping[str, Any]) -> ResponseBody:
    """Ends a running response unless it has ended meanwhile, and returns it. Raises UnknownSession or Unavailable."""
    stored = json.loads(document)
    stored["response"].update(changes)
    response_id = stored["response"]["id"]
    await store.put(owner, response_id, to_json(stored).encode(), len(document))
    await store.forget_running(owner, response_id)
    return stored_response(await store.get(owner, response_id))


def stored_response(document: bytes) -> ResponseBody:
    body: ResponseBody = json.loads(document)["response"]
    return body


def stored_items(document: bytes) -> tuple[Item, ...]:
    """Returns the conversation up to the end of the response, as input items."""
    stored = json.loads(document)
    return (*stored["input"], *parse_items(stored["response"]["output"]))


async def dereferenced(store: ResponseStore, owner: str, items: Sequence[Item], max_bytes: int) -> list[Item]:
    """Replaces references by the items stored under their ids. Raises ValueError or Unavailable."""
    wanted = [item["id"] for item in items if item["type"] == REFERENCE]
    documents = await store.get_items(owner, tuple(dict.fromkeys(wanted)))
    for item_id in wanted:
        if item_id not in documents:
            raise ValueError(f"item {item_id[:200]!r} is not stored here; send the item itself")
    if sum(len(documents[item_id]) for item_id in wanted) > max_bytes:
        raise ValueError(f"the items that are referred to have more than {max_bytes} bytes")
    found = {item_id: parse_items([json.loads(document)]) for item_id, document in documents.items()}
    return [one for item in items for one in (found[item["id"]] if item["type"] == REFERENCE else (item,))]


def with_ids(items: Sequence[Item], answer_id: str) -> list[Item]:
    """Gives items without an id one that depends on the request alone."""
    return [
        item if "id" in item else {"id": _item_id(item, f"{answer_id} {place}"), **item}
        for place, item in enumerate(items)
    ]


def _item_id(item: Item, key: str) -> str:
    return f"{_ID_PREFIXES[item['type']]}_{hashlib.sha256(f'{key} input'.encode()).hexdigest()[:_ID_DIGITS]}"


def input_page(document: bytes, query: Mapping[str, str]) -> ItemList:
    """Returns the input's items, the last first unless order says asc. Raises InvalidRequest."""
    items: list[dict[str, Any]] = json.loads(document)["input"]
    order, limit = query.get("order", "desc"), query.get("limit", str(_DEFAULT_PAGE))
    if order not in ("asc", "desc"):
        raise InvalidRequest("order must be asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= _MAX_PAGE):
        raise InvalidRequest(f"limit must be between 1 and {_MAX_PAGE}", param="limit")
    if order == "desc":
        items.reverse()
    if "after" in query:
        ids = [item["id"] for item in items]
        if query["after"] not in ids:
            raise InvalidRequest("after must be the id of an item of this input", param="after")
        items = items[ids.index(query["after"]) + 1 :]
    page = items[: int(limit)]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(page) < len(items),
    }
