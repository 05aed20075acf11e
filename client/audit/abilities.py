"""Finds out what a server can do, with about 30 requests, before anything is tested."""

from __future__ import annotations

import dataclasses
from typing import Any

from .answers import Law, MissingChoice, NoAnswerInTime, ServerError
from .session import PROMPTS, Session
from .wire import Server

# Defaults that engines or checkpoints add on their own, switched off. llama.cpp: top_k 40, top_p 0.95, min_p 0.05.
_NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "repetition_penalty": 1.0}
_FIELDS: dict[str, Any] = {
    "seed": 5,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "presence_penalty": 0.1,
    "logit_bias": {"5": 1},
    "n": 2,
    "top_p": 0.9,
}
# parts of the names of the engines' counters of drafted tokens
_DRAFT_COUNTERS = ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens", "draft_tokens_total")
_LIST_SIZES = (20, 10, 5, 1)
# nats; two lists of one law differ by less
_SAME_LIST = 0.02


def find_abilities(session: Session) -> None:
    """Sets the session's model, abilities and prompts. Raises ServerError where it gives no greedy answer at all."""
    session.model = session.model or session.server.first_model()
    session.ask(PROMPTS[0], max_tokens=2, temperature=0)
    refused: dict[str, str] = {}

    def learn(**fields: Any) -> None:
        session.abilities = dataclasses.replace(session.abilities, refused=refused, **fields)

    def accepts(name: str, value: Any) -> bool:
        try:
            session.ask(PROMPTS[0], max_tokens=2, temperature=1.0, **{name: value})
        except ServerError as error:
            if error.is_failure and not isinstance(error, MissingChoice):
                session.record_server_error(f"server errors: {name}", error)
            refused[name] = str(error)
            return False
        return True

    skip = session.options.skip
    learn(neutral={k: v for k, v in _NEUTRAL.items() if k not in skip and accepts(k, v)})
    learn(list_size=next((s for s in _LIST_SIZES if _list_length(session, s, refused) > 0), 0))
    size = session.abilities.list_size
    _learn_identities(session, size)
    for field_name in ("prompt", "content"):
        if ids := _token_ids(session.server, session.model, field_name, PROMPTS[0]):
            learn(tokenize_field=field_name)
            learn(takes_ids=_answers_ids(session, ids, refused))
            break
    if session.abilities.takes_ids:
        session.prompts = [_token_ids(session.server, session.model, field_name, text) for text in PROMPTS]
        if size and "prompt_logprobs" not in skip:
            learn(prompt_logprobs=_has_prompt_logprobs(session, refused))
    learn(accepted=frozenset(k for k, v in _FIELDS.items() if k not in skip and accepts(k, v)))
    learn(lists=_kind_of_lists(session))
    twice = [session.ask(PROMPTS[0], max_tokens=48, temperature=1.0).text for _ in range(2)]
    learn(hidden_seed=twice[0] == twice[1] and "seed" in session.abilities.accepted)
    streamed = session.ask(session.prompts[0], max_tokens=48, temperature=0, stream=True)
    if streamed.longest_chunk > 1:
        learn(drafts_seen=f"chunks of up to {streamed.longest_chunk} tokens")


def drafts_seen(session: Session) -> str:
    """Where the answers so far show that tokens were drafted; empty: nowhere."""
    if any(answer.has_drafts for answer in session.greedy_answers):
        return "an answer's timings"
    return "/metrics" if _metrics_count_drafts(session.server) else session.abilities.drafts_seen


def _metrics_count_drafts(server: Server) -> bool:
    try:
        lines = server.get("/metrics").splitlines()
    except (ServerError, NoAnswerInTime):
        return False
    counters = [line for line in lines if line[:1] != "#" and any(name in line for name in _DRAFT_COUNTERS)]
    return any(_value(line) > 0 for line in counters)


def _value(line: str) -> float:
    try:
        return float(line.rsplit(" ", 1)[1])
    except (ValueError, IndexError):
        return 0.0


def _list_length(session: Session, size: int, refused: dict[str, str]) -> int:
    try:
        answer = session.ask(PROMPTS[0], max_tokens=2, temperature=0, logprobs=size)
    except ServerError as error:
        refused[f"logprobs {size}"] = str(error)
        return 0
    return len(answer.tokens[0].law) if answer.tokens else 0


def _learn_identities(session: Session, size: int) -> None:
    wish = {"return_token_ids": True, "return_tokens_as_token_ids": True if size else None}
    try:
        answer = session.ask(PROMPTS[0], max_tokens=2, temperature=0, logprobs=size or None, **wish)
    except ServerError:
        return
    named = bool(answer.tokens) and all(token.key.startswith("token_id:") for token in answer.tokens)
    gives = bool(session.ask(PROMPTS[0], max_tokens=2, temperature=0, return_token_ids=True).ids)
    session.abilities = dataclasses.replace(session.abilities, names_ids=named, gives_ids=gives)


def _token_ids(server: Server, model: str, field_name: str, text: str) -> list[int]:
    try:
        return [int(token) for token in server.post("/tokenize", {"model": model, field_name: text})["tokens"]]
    except (ServerError, LookupError, TypeError, ValueError):
        return []


def _answers_ids(session: Session, ids: list[int], refused: dict[str, str]) -> bool:
    try:
        session.ask(ids, max_tokens=2, temperature=0)
    except ServerError as error:
        refused["prompts of token ids"] = str(error)
        return False
    return True


def _has_prompt_logprobs(session: Session, refused: dict[str, str]) -> bool:
    try:
        size = session.abilities.list_size
        answer = session.ask(session.prompts[0], max_tokens=1, temperature=0, prompt_logprobs=size)
    except ServerError as error:
        refused["prompt_logprobs"] = str(error)
        return False
    return answer.prompt_laws is not None and len(answer.prompt_laws) == len(session.prompts[0])


def _kind_of_lists(session: Session) -> str:
    """Whether the lists are the model's law or the one after temperature, by the first token at T = 1 and 0.5."""
    if session.abilities.list_size < 2:
        return "none"

    def first(temperature: float) -> Law:
        size = session.abilities.list_size
        answer = session.ask(session.prompts[0], max_tokens=1, temperature=temperature, logprobs=size)
        return answer.tokens[0].law if answer.tokens else ()

    one, half = dict(first(1.0)), dict(first(0.5))
    common = [key for key in one if key in half]
    if len(common) < 2:
        return "unclear"
    if sum(abs(one[key] - half[key]) for key in common) / len(common) < _SAME_LIST:
        return "raw"
    top = common[0]
    doubled = [abs((half[key] - half[top]) - 2 * (one[key] - one[top])) for key in common]
    return "after temperature" if sum(doubled) / len(doubled) < 2.5 * _SAME_LIST else "unclear"
