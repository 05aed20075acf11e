"""Prompts that any machine has: token windows of the standard library's own sources, at fixed places."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from tokenizers import Tokenizer

# File and character offset. Which text stands there may change with Python; that it is Python does not.
_PLACES = (
    ("argparse.py", 4000),
    ("ast.py", 9000),
    ("bdb.py", 6000),
    ("calendar.py", 5000),
    ("codecs.py", 7000),
    ("collections/__init__.py", 12000),
    ("configparser.py", 20000),
    ("csv.py", 3000),
    ("dataclasses.py", 15000),
    ("difflib.py", 11000),
    ("dis.py", 4000),
    ("doctest.py", 30000),
    ("enum.py", 8000),
    ("fractions.py", 6000),
    ("functools.py", 10000),
    ("gettext.py", 2000),
    ("heapq.py", 9000),
    ("inspect.py", 40000),
    ("ipaddress.py", 18000),
    ("json/decoder.py", 1500),
    ("logging/__init__.py", 25000),
    ("shutil.py", 14000),
    ("tarfile.py", 33000),
    ("textwrap.py", 4000),
)
# Shorter than a KV block, not a multiple of one, longer than one prefill chunk (256) and than two.
_LENGTHS = (3, 17, 40, 131, 300, 520)
_CHARS_PER_TOKEN = 8


def stdlib_prompts(tokenizer_folder: Path) -> list[tuple[int, ...]]:
    """24 prompts as token ids, four of each length."""
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    prompts = []
    for place, (name, offset) in enumerate(_PLACES):
        length = _LENGTHS[place % len(_LENGTHS)]
        text = (stdlib / name).read_text(encoding="utf-8")[offset : offset + _CHARS_PER_TOKEN * length]
        token_ids = tokenizer.encode(text, add_special_tokens=False).ids[:length]
        if len(token_ids) != length:
            raise ValueError(f"{name} has {len(token_ids)} tokens from {offset} on, {length} are wanted")
        prompts.append(tuple(token_ids))
    return prompts
