"""The grammar of a custom tool as one regular expression, for a call's one string: a JSON schema's `pattern`.

A tool's input stands within JSON in most families' calls, where no context-free grammar can be held. Those of agents
(Codex's patches, its scripts) do not recur, so that their rules can be put in for their names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from outrider.shared.errors import InvalidRequest

# characters; longest expanded expression; every rule that is used twice doubles it
_MAX_CHARS = 64 * 1024
_TOKEN = re.compile(
    r"""(?P<skip>[ \t\r\n]+|//[^\n]*)
    |(?P<regex>/(?:[^/\\\n]|\\[^\n])+/[imsu]*)
    |(?P<text>"(?:[^"\\\n]|\\[^\n])*"i?)
    |(?P<import>%import[ \t]+common\.(?P<imported>\w+)|%import[ \t]+common[ \t]*\((?P<several>[\w, \t]+)\))
    |(?P<begin>[?!]?(?P<defined>\w+)(?:\.-?\d+)?[ \t]*:)
    |(?P<alias>->[ \t]*\w+)
    |(?P<name>\w+)
    |(?P<range>~[ \t]*(?P<least>\d+)(?:[ \t]*\.\.[ \t]*(?P<most>\d+))?)
    |(?P<mark>[()\[\]|?*+])""",
    re.VERBOSE,
)
# Lark's common terminals, by name.
_COMMON = {
    "LF": r"\n",
    "CR": r"\r",
    "NEWLINE": r"(?:\r?\n)+",
    "WS": r"[ \t\f\r\n]+",
    "WS_INLINE": r"[ \t]+",
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "NUMBER": r"[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?[0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]+)?",
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[_a-zA-Z][_a-zA-Z0-9]*",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\[^\n])*"',
}


def custom_pattern(form: Mapping[str, Any], tool: str) -> str:
    """Returns the regex for a format of type grammar. Raises InvalidRequest that names the tool."""
    syntax, definition = form.get("syntax"), form.get("definition")
    try:
        if not isinstance(definition, str) or syntax not in ("lark", "regex"):
            raise ValueError("must have a definition and the syntax lark or regex")
        _bounded(definition)
        expression = definition if syntax == "regex" else _Rules(definition).expanded("start")
    except (ValueError, RecursionError) as error:
        what = "is nested too deep" if isinstance(error, RecursionError) else error
        raise InvalidRequest(f"tools: the grammar of {tool!r} {what}", param="tools") from None
    return f"^(?:{expression})$"


class _Rules:
    """The definitions of a Lark grammar, each a list of tokens. Raises ValueError."""

    def __init__(self, source: str) -> None:
        self._tokens: dict[str, list[re.Match[str]]] = {}
        self._expressions: dict[str, str] = {}
        self._open: set[str] = set()
        place, rule = 0, None
        while place < len(source):
            token = _TOKEN.match(source, place)
            if token is None:
                shown = source[place : place + 40].split("\n")[0]
                raise ValueError(f"has what cannot be held within a call: {shown!r}")
            place = token.end()
            if token["begin"]:
                rule = self._tokens.setdefault(token["defined"], [])
            elif token["import"]:
                for name in re.findall(r"\w+", token["imported"] or token["several"]):
                    if name not in _COMMON:
                        raise ValueError(f"imports {name[:80]!r}, which is not known here")
                    self._expressions[name] = _COMMON[name]
            elif not (token["skip"] or token["alias"]):
                if rule is None:
                    raise ValueError(f"begins with {token[0][:40]!r}, which is no rule")
                rule.append(token)

    def expanded(self, name: str) -> str:
        """Returns the rule with all rules that it names expanded."""
        if name not in self._expressions:
            if name not in self._tokens:
                raise ValueError(f"has no rule {name[:80]!r}")
            if name in self._open:
                raise ValueError(f"recurs in {name[:80]!r}; only grammars without recursion can be held within a call")
            self._open.add(name)
            tokens = iter([*self._tokens[name], None])
            expression, end = self._alternatives(tokens)
            if end is not None:
                raise ValueError(f"has an unpaired {end!r} in {name[:80]!r}")
            self._expressions[name] = expression
        return self._expressions[name]

    def _alternatives(self, tokens: Any) -> tuple[str, str | None]:
        """Returns the alternatives as one expression, and the token that closes them; None: the rule's end."""
        parts: list[str] = [""]
        last = ""
        for token in tokens:
            mark = token["mark"] if token is not None else None
            if token is None or mark in (")", "]"):
                expression = "|".join([*parts[:-1], parts[-1] + last])
                return _bounded(f"(?:{expression})" if len(parts) > 1 else expression), mark
            if mark == "|":
                parts[-1] += last
                parts.append("")
                last = ""
            elif mark in ("?", "*", "+") or token["range"]:
                most = "" if token["most"] is None else token["most"]
                times = mark or (f"{{{token['least']},{most}}}" if most else f"{{{token['least']}}}")
                if not last:
                    raise ValueError(f"has {token[0]!r} behind nothing")
                last = f"(?:{last}){times}"
            else:
                parts[-1], last = _bounded(parts[-1] + last), self._one(token, tokens)
        raise ValueError("ends early")

    def _one(self, token: re.Match[str], tokens: Any) -> str:
        if token["text"]:
            body = token["text"].removesuffix("i")
            try:
                text = re.escape(json.loads(body, strict=False))
            except ValueError:
                raise ValueError(f"has an escape that is not known here: {body[:80]}") from None
            return f"(?i:{text})" if token["text"].endswith("i") else text
        if token["regex"]:
            body, _, flags = token["regex"][1:].rpartition("/")
            flags = flags.replace("u", "")
            return f"(?{flags}:{body})" if flags else f"(?:{body})"
        if token["name"]:
            return f"(?:{self.expanded(token['name'])})"
        inner, end = self._alternatives(tokens)
        if end != {"(": ")", "[": "]"}.get(token["mark"]):
            raise ValueError(f"has an unpaired {token['mark']!r}")
        return f"(?:{inner})" if end == ")" else f"(?:{inner})?"


def _bounded(expression: str) -> str:
    if len(expression) > _MAX_CHARS:
        raise ValueError(f"has more than {_MAX_CHARS} characters")
    return expression
