"""Held-out prompts of one kind: code, prose or chat from the built-in corpus, or from a user's file.

Code is the start of a file, prose the start of a module's documentation, chat a request for a function; all from
held-out documents. Not here: running the requests (evaluate_heads.py).
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Callable
from pathlib import Path

from outrider.training.data.prompts import Prompt, corpus_documents, corpus_prompts, read_prompts
from outrider.training.errors import PromptError

_MIN_PROSE_CHARS = 160


def domain_prompts(domain: str, corpus: Path, num_prompts: int, seed: int) -> tuple[str, list[Prompt]]:
    """Returns (name, prompts) for "code", "prose", "chat" or "name=file".

    Raises PromptError for other names, or if there are no prompts.
    """
    name, is_file, path = domain.partition("=")
    if is_file:
        return name, read_prompts(Path(path))[:num_prompts]
    if name not in _BUILT_IN:
        raise PromptError(f"--domain {domain!r}: must be one of {', '.join(_BUILT_IN)}, or name=prompts.jsonl")
    prompts = _BUILT_IN[name](corpus, seed)
    if not prompts:
        raise PromptError(f"--domain {name}: the held-out corpus in {corpus} has no such prompts")
    return name, prompts[:num_prompts]


def _code(corpus: Path, seed: int) -> list[Prompt]:
    return [prompt for prompt in _held_out(corpus, seed) if not prompt.is_chat]


def _chat(corpus: Path, seed: int) -> list[Prompt]:
    return [prompt for prompt in _held_out(corpus, seed) if prompt.is_chat]


def _held_out(corpus: Path, seed: int) -> list[Prompt]:
    return corpus_prompts(corpus, "heldout", num_prompts=1_000_000, seed=seed)


def _prose(corpus: Path, seed: int) -> list[Prompt]:
    found = []
    for document in corpus_documents(corpus, "heldout"):
        try:
            text = ast.get_docstring(ast.parse(document))
        except (SyntaxError, ValueError):
            continue
        if text and len(text) >= _MIN_PROSE_CHARS:
            cut = text.rfind(" ", 0, len(text) // 2)
            found.append(Prompt(text='"""' + text[:cut]))
    return sorted(found, key=lambda prompt: hashlib.sha256(f"{seed}:{prompt.text}".encode()).digest())


_BUILT_IN: dict[str, Callable[[Path, int], list[Prompt]]] = {"code": _code, "prose": _prose, "chat": _chat}
