"""Prompts for measurements: places in the standard library's own source, of several lengths."""

from __future__ import annotations

import inspect
import json
import random
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
