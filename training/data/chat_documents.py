"""Chat documents made from documented functions: the user asks for a function, the assistant writes its source.

Not instruction tuning: just enough text in the chat template for chat requests to get code back.
Used by `training.data.corpus`.
"""

from __future__ import annotations

import ast
import hashlib
import re
import textwrap
from collections.abc import Iterator

MIN_CHARS = 120
MAX_CHARS = 1600
# First words of docstrings that can follow "that" in the third person: "Return the x" -> "that returns the x".
_VERB_LIST = """
add append apply ask assert assign attach build calculate call check clean clear close collect compare
compute  configure connect construct convert copy count create decode decorate define delete detect
determine disable  display draw dump enable encode ensure enter escape evaluate execute expand extract fetch
fill filter find  flush format generate get give handle implement import indicate initialize insert install
invoke iterate join  list load locate log look make map mark match merge modify move normalize open override
parse perform pop  prepare print process produce provide push put quote raise read receive record register
reload remove rename  render replace reset resolve restore retrieve return rotate run save search select
send set show skip sort  split start stop store strip take test transform translate truncate try unregister
update use validate verify  wait wrap write yield
"""
VERBS = frozenset(_VERB_LIST.split())


def _third_person(verb: str) -> str:
    if verb.endswith(("s", "sh", "ch", "x")):
        return verb + "es"
    return verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in "aeiou" else verb + "s"


_THIRD_PERSON = {_third_person(verb): verb for verb in VERBS}


def request_for(name: str, docstring: str) -> str | None:
    """Returns the user's message for a function, or None if its docstring does not start with a known verb."""
    first_line = docstring.strip().split("\n")[0].strip().rstrip(".")
    first_word, _, rest = first_line.partition(" ")
    verb = first_word.lower()
    if not rest or len(first_line) > 100:
        return None
    if verb in VERBS:
        verb = _third_person(verb)
    elif verb not in _THIRD_PERSON:
        return None
    return f"Write a function `{name}` that {verb} {rest}"


def chat_text(request: str, reply: str) -> str:
    """Returns one exchange in the tokenizer's chat template; a test compares the two."""
    return f"<|user|>\n{request}<|end|>\n<|assistant|>\n{reply}<|end|>\n"


def _functions(text: str) -> Iterator[str]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.split("\n")
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
            continue
        source = textwrap.dedent("\n".join(lines[node.lineno - 1 : node.end_lineno]))
        docstring = ast.get_docstring(node)
        if docstring and MIN_CHARS <= len(source) <= MAX_CHARS and re.match(r"(async )?def ", source):
            request = request_for(node.name, docstring)
            if request:
                yield chat_text(request, source)


def chat_documents(texts: list[str], max_chars: int) -> list[str]:
    """Returns chat documents of at most `max_chars` characters in total, chosen by hash among the texts' functions."""
    candidates = sorted(
        {document for text in texts for document in _functions(text)},
        key=lambda document: hashlib.sha256(document.encode()).digest(),
    )
    chosen, num_chars = [], 0
    for document in candidates:
        if num_chars + len(document) <= max_chars:
            chosen.append(document)
            num_chars += len(document)
    return chosen
