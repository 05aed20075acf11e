"""Prompts for benchmarks: pieces of the standard library's source, of several lengths."""

from __future__ import annotations

import inspect
import json
import random
import re
import tempfile
import textwrap
import zipfile
from types import ModuleType

_MODULES: tuple[ModuleType, ...] = (json, random, tempfile, textwrap, zipfile, inspect)


def code_prompts(count: int, *, num_chars: int = 700) -> list[str]:
    """`count` different pieces of source, each ending at a line's end; the same on every run."""
    prompts: list[str] = []
    offset = 0
    while len(prompts) < count:
        for module in _MODULES:
            source = inspect.getsource(module)
            start = (len(prompts) * 1531 + offset) % max(1, len(source) - 2 * num_chars)
            start = source.find("\n", start) + 1
            end = source.rfind("\n", start, start + num_chars) + 1
            if end > start:
                prompts.append(source[start:end])
        offset += 977
    return prompts[:count]


def mixed_prompts(count: int) -> list[str]:
    """Code, prose and copying in turn: pieces of source, starts of documentation, a function begun again."""
    code = code_prompts(count)
    prose = [text for module in _MODULES for text in _documentation(module)]
    prompts = []
    for place in range(count):
        kind = place % 3
        if kind == 0:
            prompts.append(code[place])
        elif kind == 1:
            prompts.append(f'"""{prose[place // 3 % len(prose)]}')
        else:
            lines = code[place].splitlines(keepends=True)
            prompts.append("".join([*lines, "\n", *lines[: max(1, len(lines) // 4)]]))
    return prompts


def unrepeated_prompts(count: int) -> list[str]:
    """Words of the same sources in random order, once per prompt: an n-gram lookup finds nothing."""
    words = sorted({word for module in _MODULES for word in re.findall(r"[a-z]{4,}", inspect.getsource(module))})
    rng = random.Random(0)
    return [" ".join(rng.sample(words, 80)) for _ in range(count)]


def _documentation(module: ModuleType) -> list[str]:
    """First halves of the longer docstrings."""
    documented = [getattr(module, name) for name in getattr(module, "__all__", dir(module))]
    texts = [inspect.getdoc(item) or "" for item in documented]
    return [text[: text.rfind(" ", 0, len(text) // 2)] for text in texts if len(text) >= 200]
