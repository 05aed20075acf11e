"""A request of Dynamo's frontend as a body of /v1/completions, and the events of the answer as Dynamo's chunks.

What a body may say is checked by the gateway, which names what is wrong with it. Not here: who is asked (gateways.py).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from outrider.shared.errors import CommitRefused, InternalError, InvalidRequest

# Dynamo has the names of vLLM's and OpenAI's fields, so the values go on as they are.
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty"),
    *("repetition_penalty", "use_beam_search", "length_penalty"),
)
_GRAMMAR = ("json", "regex", "choice", "grammar", "whitespace_pattern")
_STOP_IDS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
_NOT_SERVED = ("multi_modal_data", "encoder_result", "prefill_result", "bootstrap_info", "prompt_embeds")
# Dynamo carries token ids as signed 32-bit numbers; one that is none breaks the stream of its frontend.
_MAX_TOKEN_ID = 2**31 - 1
_FINISH = {"stop": "stop", "length": "length", "abort": "cancelled"}
_TOKEN_PREFIX = "token_id:"


def completion(request: Mapping[str, Any], dynamo_id: str, model: str, context_length: int) -> dict[str, Any]:
    """The body of a request, or of the rest of one that was begun by another worker. Raises InvalidRequest."""
    for name in _NOT_SERVED:
        if request.get(name):
            raise InvalidRequest(f"{name} is not served", param=name)
    sampling, stops = _object(request, "sampling_options"), _object(request, "stop_conditions")
    outputs = _object(request, "output_options")
    if stops.get("max_thinking_tokens") is not None:
        raise InvalidRequest("max_thinking_tokens is not served", param="max_thinking_tokens")
    if sampling.get("n") not in (None, 1) or sampling.get("best_of") not in (None, 1):
        raise InvalidRequest("n above 1 is not served: Dynamo ends a worker's stream with its first choice", param="n")
    prompt = _list(request, "token_ids")
    max_tokens, grammar = stops.get("max_tokens"), _object(sampling, "guided_decoding")
    body = {
        **{name: sampling.get(name) for name in _SAMPLING},
        "max_tokens": max(1, context_length - len(prompt)) if max_tokens is None else max_tokens,
        "min_tokens": stops.get("min_tokens"),
        "ignore_eos": stops.get("ignore_eos"),
        "stop_token_ids": [token_id for name in _STOP_IDS for token_id in _list(stops, name)],
        "structured_outputs": {name: grammar[name] for name in _GRAMMAR if grammar.get(name) is not None} or None,
        "logprobs": outputs.get("logprobs"),
        "prompt_logprobs": outputs.get("prompt_logprobs"),
        "return_tokens_as_token_ids": True,
        "cache_salt": _object(request, "routing").get("cache_salt"),
        "request_id": _request_id(dynamo_id, sampling, prompt),
        "model": model,
        "prompt": prompt,
        "stream": True,
        "return_token_ids": True,
    }
    return {name: value for name, value in body.items() if value is not None}


def _request_id(dynamo_id: str, sampling: Mapping[str, Any], prompt: list[int]) -> str:
    """An id that every worker finds for a request: from what a migration leaves as it was.

    Callers may choose Dynamo's own id, so it alone does not say that two requests are one.
    """
    said = json.dumps([sampling, prompt[:1]], sort_keys=True, default=repr)
    return f"{dynamo_id}-{hashlib.sha256(said.encode()).hexdigest()[:16]}"


def _object(holder: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = holder.get(name)
    if value is not None and not isinstance(value, Mapping):
        raise InvalidRequest(f"{name} is not an object", param=name)
    return value or {}


def _list(holder: Mapping[str, Any], name: str) -> list[Any]:
    value = holder.get(name)
    if value is not None and not isinstance(value, list):
        raise InvalidRequest(f"{name} is not a list", param=name)
    return value or []


class Chunks:
    """The chunks of one request. token_ids: its prompt, and behind it what Dynamo's frontend has of the output."""

    def __init__(self, token_ids: list[int]) -> None:
        self._given = token_ids
        self._prompt_len = len(token_ids)
        self._known: list[int] = []  # of the output, and not seen in an event yet
        self._num_output = 0

    def of(self, event: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Raises InternalError for an event that no gateway sends, CommitRefused for another request's."""
        choices = event.get("choices")
        if not isinstance(choices, list) or not all(isinstance(choice, Mapping) for choice in choices):
            raise InternalError("an event of the gateway has no choices")
        for choice in choices:
            if choice.get("prompt_token_ids") is not None:
                self._open(choice["prompt_token_ids"])
            chunk = self._chunk(choice)
            if chunk["token_ids"] or "finish_reason" in chunk:
                yield chunk

    def _open(self, prompt: Any) -> None:
        if not isinstance(prompt, list) or self._given[: len(prompt)] != prompt:
            raise CommitRefused("another request has this id")
        self._prompt_len, self._known = len(prompt), self._given[len(prompt) :]

    def _chunk(self, choice: Mapping[str, Any]) -> dict[str, Any]:
        token_ids, index = choice.get("token_ids"), choice.get("index")
        if type(index) is not int or not isinstance(token_ids, list) or not all(map(_is_token_id, token_ids)):
            raise InternalError("an event of the gateway has no token ids")
        self._num_output += len(token_ids)
        num_known = min(len(token_ids), len(self._known))
        if token_ids[:num_known] != self._known[:num_known]:
            raise CommitRefused("the log has other tokens than were sent: they were lost with Redis and drawn again")
        del self._known[:num_known]
        chunk = {"token_ids": token_ids[num_known:], "index": index, **_logprobs(choice.get("logprobs"), num_known)}
        finish = choice.get("finish_reason")
        if finish is not None:
            if self._known:
                raise CommitRefused("the log has fewer tokens than were sent: they were lost with Redis")
            chunk["finish_reason"] = _FINISH.get(finish, "error")
            counts = {"prompt_tokens": self._prompt_len, "completion_tokens": self._num_output}
            chunk["completion_usage"] = {**counts, "total_tokens": sum(counts.values())}
        return chunk


def _is_token_id(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _logprobs(logprobs: Any, num_skipped: int) -> dict[str, Any]:
    """OpenAI's log-probabilities, with tokens named by their ids, in Dynamo's form."""
    if logprobs is None:
        return {}
    try:
        tops = [_ranked(top or {}) for top in logprobs["top_logprobs"]]
        return {"log_probs": logprobs["token_logprobs"][num_skipped:], "top_logprobs": tops[num_skipped:]}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InternalError("an event of the gateway has broken log-probabilities") from error


def _ranked(top: Mapping[str, float]) -> list[dict[str, Any]]:
    pairs = sorted(top.items(), key=lambda pair: -pair[1])
    return [
        {"rank": rank, "token_id": int(name.removeprefix(_TOKEN_PREFIX)), "logprob": value}
        for rank, (name, value) in enumerate(pairs, 1)
    ]
