"""Tool calls: streamed equals whole, arguments are JSON, and drafts change neither."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .answers import Answer, ServerError, Token
from .greedy import tolerance
from .session import Session
from .verdicts import Verdict
from .wire import CHAT

# calls, each asked for in two or three ways; a defect of 5 % of the calls is seen in 71 % of the runs of 24
_ROUNDS = 24
_THOROUGH_ROUNDS = 250
_THOROUGH_TOKENS = 60_000
_WRONG = ("wrong", "invalid JSON")
_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "note": {"type": "string"}},
            "required": ["city", "days"],
        },
    },
}


def check_tools(session: Session) -> None:
    test = "tools: streamed = whole, valid JSON"
    rounds = _THOROUGH_ROUNDS if session.options.tokens >= _THOROUGH_TOKENS else _ROUNDS
    listed = _lists(session)
    kinds: Counter[str] = Counter()
    for number in range(rounds):
        body = {**_body(session, number), **listed}
        whole, streamed = (session.server.ask(CHAT, {**body, "stream": stream})[0] for stream in (False, True))
        others = [streamed, *([_of_reference(session, body)] if session.has_reference else [])]
        kind = _judge(session, whole, others) if whole.calls else "without a call"
        kinds[kind] += 1
        if kind in _WRONG:
            session.keep(test, "equal calls with JSON arguments", whole, *others, path=CHAT)
    told = f"of {rounds} requests: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    broken, unclear = any(kinds[kind] for kind in _WRONG), kinds["near tie"] + kinds["unknown"]
    verdict = Verdict.FAIL if broken else Verdict.DIFFERS if unclear else Verdict.PASS
    if kinds["without a call"] == rounds:
        verdict = Verdict.NOT_TESTED
    share = "12 %" if rounds == _ROUNDS else "1.2 %"
    session.record(test, verdict, told, f"a defect of {share} of the calls, in 95 % of the runs")


def _judge(session: Session, whole: Answer, others: Sequence[Answer]) -> str:
    """Compares the calls of one request asked in several ways."""
    if any(answer.finish != "length" and not _are_json(answer) for answer in (whole, *others)):
        return "invalid JSON"
    unequal = [answer for answer in others if answer.calls != whole.calls]
    kinds = {_difference(session, whole.tokens, answer.tokens) for answer in unequal}
    return next((kind for kind in ("wrong", "unknown", "near tie") if kind in kinds), "same")


def _difference(session: Session, one: Sequence[Token], other: Sequence[Token]) -> str:
    """Whether calls differ by rounding. Without lists, or where one output is the other's start, nobody can tell."""
    if not one or not other:
        return "unknown"
    pair = next(((a, b) for a, b in zip(one, other, strict=False) if a.key != b.key), None)
    if pair is None:
        return "wrong" if len(one) == len(other) else "unknown"
    law = dict(pair[0].law or pair[1].law)
    if len(law) < 2:
        return "unknown"
    missed = max(max(law.values()) - law.get(token.key, min(law.values())) for token in pair)
    return "near tie" if missed <= tolerance(session) else "wrong"


def _lists(session: Session) -> dict[str, Any]:
    """The fields for lists of logprobs, if the server takes them with tools. Raises ServerError for no tools at all."""
    if session.abilities.list_size > 1:
        fields = {"logprobs": True, "top_logprobs": session.abilities.list_size}
        with suppress(ServerError):
            session.server.ask(CHAT, {**_body(session, 0), **fields})
            return fields
    session.server.ask(CHAT, _body(session, 0))
    return {}


def _body(session: Session, number: int) -> dict[str, Any]:
    city = ("Paris", "Oslo", "Rome", "Lima")[number % 4]
    text = f"What will the weather be in {city} for the next {2 + number} days? Use the tool."
    wanted = {"model": session.model, "messages": [{"role": "user", "content": text}], "tools": [_TOOL]}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    return {**wanted, "tool_choice": choice, "temperature": 0, "max_tokens": 96, **session.options.body}


def _of_reference(session: Session, body: dict[str, Any]) -> Answer:
    server = session.reference or session.server
    return server.ask(CHAT, {**body, **(session.options.reference_body or {})})[0]


def _are_json(answer: Answer) -> bool:
    try:
        return all(isinstance(json.loads(call.arguments), dict) for call in answer.calls)
    except ValueError:
        return False
