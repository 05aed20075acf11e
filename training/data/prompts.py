"""Prompts for a server: from a text or JSONL file, or from the built-in corpus.

A text file has one prompt per line. A JSONL line is a string, `{"prompt": text or token ids}`, `{"messages": [...]}` or
ShareGPT's `{"conversations": [{"from": "human", "value": ...}, ...]}` (up to the last human turn). Not here: running
the requests (prepare_data.py).
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.training.data.corpus import CorpusConfig, build_documents, default_roots, read_documents
from outrider.training.errors import PromptError

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_USER, _END, _ASSISTANT = "<|user|>\n", "<|end|>", "<|assistant|>\n"
# characters; length of a corpus prompt: the start of a document, cut at a line's end, as tokens join a break with what
# follows
_MIN_CORPUS_CHARS, _MAX_CORPUS_CHARS = 80, 600


@dataclass(frozen=True)
class Prompt:
    """A prompt: exactly one of `text`, `token_ids` (for /v1/completions) and `messages` (for /v1/chat/completions)."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None

    @property
    def is_chat(self) -> bool:
        return self.messages is not None

    def fields(self) -> dict[str, Any]:
        """Returns the request's field, also used in the output row."""
        if self.messages is not None:
            return {"messages": list(self.messages)}
        return {"prompt": self.text if self.token_ids is None else list(self.token_ids)}


def read_prompts(path: Path) -> list[Prompt]:
    """Reads the prompts of a file, by suffix (.jsonl; else text). Raises PromptError with the line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PromptError(f"{path} cannot be read: {error}") from error
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if path.suffix == ".jsonl":
        prompts = [_prompt_of_line(path, number, line) for number, line in lines]
    else:
        prompts = [Prompt(text=line.rstrip("\r")) for _, line in lines]
    if not prompts:
        raise PromptError(f"{path} has no prompts")
    return prompts


def _prompt_of_line(path: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
        return prompt_of_row(row)
    except json.JSONDecodeError as error:
        raise PromptError(f"{path}, line {number} is not JSON: {error}") from error
    except PromptError as error:
        raise PromptError(f"{path}, line {number}: {error}") from error


def prompt_of_row(row: object) -> Prompt:
    """Parses one JSONL value as a prompt. Raises PromptError."""
    if isinstance(row, str) and row:
        return Prompt(text=row)
    if isinstance(row, dict):
        for name, parse in (("prompt", _from_prompt), ("messages", _from_messages), ("conversations", _from_sharegpt)):
            if name in row:
                return parse(row[name])
    raise PromptError("must be a text, or an object with prompt, messages or conversations")


def _from_prompt(value: object) -> Prompt:
    if isinstance(value, str) and value:
        return Prompt(text=value)
    if isinstance(value, list) and value and all(isinstance(item, int) and item >= 0 for item in value):
        return Prompt(token_ids=tuple(value))
    raise PromptError("prompt must be a non-empty text or list of token ids")


def _from_messages(value: object) -> Prompt:
    if not isinstance(value, list) or not value:
        raise PromptError("messages must be a non-empty list")
    for message in value:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise PromptError("every message must be an object with a role")
    return Prompt(messages=tuple(value))


def _from_sharegpt(value: object) -> Prompt:
    if not isinstance(value, list):
        raise PromptError("conversations must be a list")
    messages = []
    for turn in value:
        role = _SHAREGPT_ROLES.get(str(turn.get("from"))) if isinstance(turn, dict) else None
        if role is None or not isinstance(turn.get("value"), str):
            raise PromptError(f"every turn needs a value and from, one of {', '.join(_SHAREGPT_ROLES)}")
        messages.append({"role": role, "content": turn["value"]})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise PromptError("conversations has no human turn")
    return Prompt(messages=tuple(messages))


def corpus_prompts(work_dir: Path, split: str, num_prompts: int, seed: int = 0) -> list[Prompt]:
    """Returns starts of the corpus's documents, chat documents as messages; a function of the corpus and the seed.

    split: "train" or "heldout". Fewer than `num_prompts` if the corpus has fewer documents.
    """
    return list(islice(_document_prompts(corpus_documents(work_dir, split), seed), num_prompts))


def corpus_documents(work_dir: Path, split: str) -> list[str]:
    """Returns the corpus in `work_dir`, else one collected now from this machine's Python source (10 s)."""
    if (work_dir / f"{split}.jsonl").exists():
        return read_documents(work_dir, split)
    return build_documents(CorpusConfig(roots=default_roots()))[split]


def _document_prompts(documents: list[str], seed: int) -> Iterator[Prompt]:
    for document in sorted(documents, key=lambda text: hashlib.sha256(f"{seed}:{text}".encode()).digest()):
        if document.startswith(_USER):
            request = document[len(_USER) :].partition(_END)[0]
            yield Prompt(messages=({"role": "user", "content": request},))
            continue
        length = random.Random(f"{seed}:{document[:200]}").randint(_MIN_CORPUS_CHARS, _MAX_CORPUS_CHARS)
        cut = document.rfind("\n", _MIN_CORPUS_CHARS // 2, length)
        if cut > 0:
            yield Prompt(text=document[:cut])
