"""A server's answers in one form whatever the engine, and its failures.

The server is not trusted: what is not of OpenAI's form is a ServerError.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# nats; engines report "impossible" as a very small number, which is left out of a list
_IMPOSSIBLE_LOGPROB = -1e4
# nats; the most that rounding lifts a log-probability above 0
_ABOVE_ZERO = 0.01
# characters of an error's text that are kept
_ERROR_CHARS = 300

Law = tuple[tuple[str, float], ...]  # (token key, log-probability), most likely first


class ServerError(Exception):
    """The server refused the request (4xx), failed (5xx), or gave no answer that can be read (status 0)."""

    def __init__(self, status: int, text: str, request: Mapping[str, Any]) -> None:
        super().__init__(f"{status}: {text[:_ERROR_CHARS]}" if status else text[:_ERROR_CHARS])
        self.status = status
        self.request = dict(request)

    @property
    def is_failure(self) -> bool:
        return self.status == 0 or self.status >= 500


class MissingChoice(ServerError):
    """The server took `n` and gave fewer choices."""


class NoAnswerInTime(Exception):
    """The deadline passed: the server is slow or hangs. Neither a refusal nor a failure, and it ends an audit."""


@dataclass(frozen=True)
class Token:
    """One generated token as the server's logprobs report it."""

    key: str  # its identity: `token_id:N` where the server names ids, else its bytes or text
    law: Law = ()


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str


@dataclass(frozen=True)
class Answer:
    request: Mapping[str, Any]
    text: str
    tokens: tuple[Token, ...] = ()
    ids: tuple[int, ...] = ()
    finish: str | None = None
    num_prompt_tokens: int | None = None  # as `usage` counts them
    num_completion_tokens: int | None = None
    calls: tuple[Call, ...] = ()
    longest_chunk: int = 0  # token ids in one event of the stream
    has_drafts: bool = False  # the answer itself counts drafted tokens
    prompt_laws: tuple[Law, ...] | None = None  # empty: not reported at this position

    @property
    def shown(self) -> str:
        """Its text, or its calls where it has no text."""
        return self.text or json.dumps([vars(call) for call in self.calls])


def read_answer(raw: Any, body: Mapping[str, Any], index: int = 0) -> Answer:
    """Choice `index` of a whole answer or of a stream's events. Raises ServerError for what is neither."""
    try:
        return _read_stream(raw, body, index) if isinstance(raw, list) else _read_whole(raw, body, index)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ServerError(0, f"not an answer in OpenAI's form: {error!r}", body) from error


def _read_whole(raw: Any, body: Mapping[str, Any], index: int) -> Answer:
    choices = {int(choice.get("index", 0)): choice for choice in raw["choices"]}
    if choices and index not in choices:
        raise MissingChoice(0, f"{len(choices)} choices of {body.get('n')}", body)
    choice = choices[index]
    message, usage = choice.get("message") or {}, raw.get("usage") or {}
    functions = [call["function"] for call in message.get("tool_calls") or []]
    prompt_logprobs = choice.get("prompt_logprobs") or raw.get("prompt_logprobs")
    return Answer(
        request=body,
        text=_text(choice.get("text") if "text" in choice else message.get("content")),
        tokens=_read_logprobs(choice.get("logprobs"), _list_size(body)),
        ids=_ids(choice.get("token_ids")),
        finish=choice.get("finish_reason"),
        num_prompt_tokens=_count(usage.get("prompt_tokens")),
        num_completion_tokens=_count(usage.get("completion_tokens")),
        calls=tuple(Call(_text(f["name"]), _text(f["arguments"])) for f in functions),
        has_drafts=bool(_count((raw.get("timings") or {}).get("draft_n"))),  # llama.cpp's
        prompt_laws=prompt_logprobs and _prompt_laws(prompt_logprobs, body["prompt_logprobs"]),
    )


def _read_stream(events: Sequence[Any], body: Mapping[str, Any], index: int) -> Answer:
    text, finish, longest = "", None, 0
    usage: Mapping[str, Any] = {}
    ids: list[int] = []
    tokens: list[Token] = []
    calls: dict[int, Call] = {}
    for event in events:
        if "error" in event:
            raise ServerError(500, str(event["error"]), body)
        usage = event.get("usage") or usage
        for choice in event.get("choices") or []:
            if choice.get("index", 0) != index:
                continue
            delta = choice.get("delta") or {}
            text += _text(choice.get("text") if "text" in choice else delta.get("content"))
            new_ids = _ids(choice.get("token_ids"))
            longest = max(longest, len(new_ids))
            ids += new_ids
            tokens += _read_logprobs(choice.get("logprobs"), _list_size(body))
            for part in delta.get("tool_calls") or []:
                place, function = int(part.get("index", 0)), part.get("function") or {}
                before = calls.get(place, Call("", ""))
                name = before.name + _text(function.get("name"))
                calls[place] = Call(name, before.arguments + _text(function.get("arguments")))
            finish = choice.get("finish_reason") or finish
    return Answer(
        request=body,
        text=text,
        tokens=tuple(tokens),
        ids=tuple(ids),
        finish=finish,
        num_completion_tokens=_count(usage.get("completion_tokens")),
        calls=tuple(calls[place] for place in sorted(calls)),
        longest_chunk=longest,
    )


def _text(value: Any) -> str:
    if value is not None and not isinstance(value, str):
        raise ValueError(f"a text that is {type(value).__name__}")
    return value or ""


def _count(value: Any) -> int | None:
    return None if value is None else int(value)


def _ids(values: Any) -> tuple[int, ...]:
    return tuple(int(value) for value in values or ())


def _list_size(body: Mapping[str, Any]) -> int:
    return int(body.get("top_logprobs") or body.get("logprobs") or 0)


def _read_logprobs(logprobs: Any, size: int) -> tuple[Token, ...]:
    """Both forms: chat's `content`, and the columns of completions."""
    if not logprobs:
        return ()
    if logprobs.get("content") is not None:
        return tuple(
            Token(_key(e), ranked({_key(d): d["logprob"] for d in e.get("top_logprobs") or []}, size))
            for e in logprobs["content"]
        )
    names = logprobs.get("tokens") or []
    lists = logprobs.get("top_logprobs") or [None] * len(names)
    return tuple(Token(str(name), ranked(listed or {}, size)) for name, listed in zip(names, lists, strict=True))


def _key(entry: Mapping[str, Any]) -> str:
    if entry.get("id") is not None:
        return f"token_id:{int(entry['id'])}"
    return "bytes:" + bytes(entry["bytes"]).hex() if entry.get("bytes") else str(entry["token"])


def _prompt_laws(positions: Sequence[Any], size: int) -> tuple[Law, ...]:
    """vLLM's form: per position None, or token id -> {"logprob": ...}."""
    laws = []
    for entries in positions:
        figures = {key: v["logprob"] if isinstance(v, dict) else v for key, v in (entries or {}).items()}
        laws.append(ranked({f"token_id:{int(key)}": figure for key, figure in figures.items()}, size))
    return tuple(laws)


def ranked(entries: Mapping[str, Any], size: int) -> Law:
    """The `size` most likely ones: some engines add the chosen token as one more. Raises ValueError."""
    figures = [(key, float(value)) for key, value in entries.items() if value is not None]
    if any(math.isnan(value) or value > _ABOVE_ZERO for _, value in figures):
        raise ValueError("a log-probability above 0, or none at all")
    possible = [(key, value) for key, value in figures if value > _IMPOSSIBLE_LOGPROB]
    return tuple(sorted(possible, key=lambda entry: -entry[1])[:size])
