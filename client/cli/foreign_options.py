"""Reads a command line that was written for another server or benchmark: its names, spellings and values.

A table (vllm_options.py, llama_options.py, bench_options.py) says which options mean one of ours, which are ignored and
which are refused, each with a sentence. Not here: our own options, which typer reads from what is left.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import typer
from typer.core import TyperCommand

from outrider.client.cli.common import clear_errors
from outrider.shared.errors import ConfigError

_NUMBER = re.compile(r"-\d+(\.\d+)?")
_OPTIONAL_VALUES = ("true", "false", "on", "off", "auto", "0", "1")
_IGNORED = "outrider.ignored"  # key of the context's meta
# A small letter counts in thousands, a capital one in 1024s, as in vLLM.
_UNITS = {letter: 1000**power for power, letter in enumerate("kmgt", 1)} | {
    letter: 1024**power for power, letter in enumerate("KMGT", 1)
}


@dataclass(frozen=True)
class OptionTable:
    """The mapping of another program's options to ours.

    same: name -> ours; ours may have a key after a dot (of a JSON option) or a value after an equals sign.
    ignored: name -> why it changes nothing. refused: name -> what to do instead. flags: ignored ones without a value;
    lists: ignored ones with several. only: name -> values that are ignored; its others are refused.
    """

    program: str
    same: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    flags: frozenset[str] = frozenset()
    lists: frozenset[str] = frozenset()
    only: Mapping[str, str] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        return {*self.same, *self.ignored, *self.refused}


def by_option(sentences: Mapping[str, str]) -> dict[str, str]:
    """Option -> sentence, of sentence -> options separated by spaces."""
    return {option: sentence for sentence, options in sentences.items() for option in options.split()}


def ignored_options(context: typer.Context) -> tuple[tuple[str, str], ...]:
    """Returns (option, reason) of each ignored option in the line that the command was called with."""
    return tuple(context.meta.get(_IGNORED, {}).items())


def ignored_line(ignored: Sequence[tuple[str, str]]) -> str:
    """Returns one line that names every ignored option, grouped by reason; empty without any."""
    names: dict[str, list[str]] = {}
    for option, reason in ignored:
        names.setdefault(reason, []).append(option)
    listed = ", ".join(f"{', '.join(options)} ({reason})" for reason, options in names.items())
    return f"ignored: {listed}" if listed else ""


def whole_number(text: str | int) -> int:
    """Parses a number as vLLM does: 8k is 8000, 8K is 8192; auto and -1 are 0, the default.

    Raises typer.BadParameter.
    """
    if isinstance(text, int) or text in ("auto", "-1"):
        return 0 if isinstance(text, str) else text
    match = re.fullmatch(r"(\d{1,15}|\d{1,9}\.\d{1,9}(?=[kmgt]))([kmgtKMGT]?)", text)
    if match is None:
        raise typer.BadParameter(f"{text!r} is not a whole number, such as 8192, 8k (8000) or 8K (8192), nor auto")
    return int(float(match[1]) * _UNITS[match[2]]) if match[2] else int(match[1])


class Reader:
    """Turns a line into one of our own. tables: the first that knows a name counts. own: our options with the name that
    each is passed on as and whether it is a flag. Raises ConfigError that names the option and what to do instead.
    """

    def __init__(self, tables: Sequence[OptionTable], own: Mapping[str, tuple[str, bool]]) -> None:
        self._tables = tables
        self._own = own
        self.ignored: dict[str, str] = {}
        self._json: dict[str, dict[str, Any]] = {}

    def read(self, words: Sequence[str]) -> list[str]:
        """Our line; `ignored` has what was left out."""
        read: list[str] = []
        rest = list(words)
        while rest:
            word = rest.pop(0)
            if word == "--":
                break
            read += self._option(word, rest) if _is_option(word) else [word]
        self._merge_keys(read)
        return [*read, "--", *rest] if rest else read

    def _option(self, word: str, rest: list[str]) -> Iterator[str]:
        name, keys, value = self._parts(word)
        table = next((table for table in self._tables if name in table.names), None)
        if name in self._own:
            yield from self._of_ours(name, keys, value, rest)
        elif table is None:
            yield word
        elif name in table.same:
            ours, _, fixed = table.same[name].partition("=")
            yield from self._option(f"{ours}{keys}", [fixed] if fixed else _with_value(value, rest))
        elif name in table.ignored or name in table.only:
            values = self._values(table, name, keys, value, rest)
            if name in table.only and not re.fullmatch(table.only[name], " ".join(values)):
                raise _refusal(table, name)
            self.ignored[name] = table.ignored.get(name) or table.refused[name]
        else:
            raise _refusal(table, name)

    def _of_ours(self, name: str, keys: str, value: str | None, rest: list[str]) -> Iterator[str]:
        ours, is_flag = self._own[name]
        rest = _with_value(value, rest)
        if keys:
            self._set_key(ours, keys, rest.pop(0) if rest else "")
            return
        yield ours
        if rest and not is_flag:
            yield rest.pop(0)

    def _parts(self, word: str) -> tuple[str, str, str | None]:
        """Our spelling of the name, the keys with their dot, the value after an equals sign."""
        name, equals, value = word.partition("=")
        name, dot, keys = name.partition(".")
        if name.startswith("--"):
            name = name.replace("_", "-")
        elif re.fullmatch(r"-O\d", name):
            name, equals, value = "-O", "=", name[2:]
        positive = f"--{name.removeprefix('--no-')}"
        if name.startswith("--no-") and not self._knows(name) and self._knows(positive) and positive not in self._own:
            name = positive
        return self._whole(name), f"{dot}{keys}", value if equals else None

    def _whole(self, name: str) -> str:
        """A name that was cut short where no other begins so, as Python's parsers take it."""
        if not name.startswith("--") or self._knows(name):
            return name
        longer = {known for known in self._known() if known.startswith(name)}
        return longer.pop() if len(longer) == 1 else name

    def _knows(self, name: str) -> bool:
        return name in self._own or any(name in table.names for table in self._tables)

    def _known(self) -> Iterator[str]:
        yield from self._own
        for table in self._tables:
            yield from table.names

    def _values(self, table: OptionTable, name: str, keys: str, value: str | None, rest: list[str]) -> list[str]:
        """The values of an option that is not ours, taken from the line."""
        if value is not None:
            return [value]
        if name in table.flags and not keys:
            return [rest.pop(0)] if rest and rest[0].lower() in _OPTIONAL_VALUES else []
        values: list[str] = []
        while rest and not _is_option(rest[0]) and (not values or name in table.lists):
            values.append(rest.pop(0))
        return values

    def _set_key(self, name: str, keys: str, text: str) -> None:
        *outer, last = keys.removeprefix(".").split(".")
        entry = self._json.setdefault(name, {})
        for key in outer:
            entry = entry.setdefault(key, {})
            if not isinstance(entry, dict):
                raise ConfigError(f"{name}.{key} is given as a value, and as an object with keys after a dot")
        try:
            entry[last] = json.loads(text)
        except (ValueError, RecursionError):
            entry[last] = text

    def _merge_keys(self, read: list[str]) -> None:
        """Gives each JSON option the keys that stood after a dot, beside those of the whole option."""
        for name, entries in self._json.items():
            whole = "{}"
            if name in read:
                place = read.index(name)
                whole = "".join(read[place + 1 : place + 2])
                del read[place : place + 2]
            try:
                read += [name, json.dumps({**json.loads(whole), **entries})]
            except (ValueError, TypeError, RecursionError):
                raise ConfigError(f"{name} is not a JSON object, and has keys after a dot too: {whole[:80]}") from None


class ForeignCommand(TyperCommand):
    """A command that also takes the lines of the programs in `tables`."""

    tables: Sequence[OptionTable] = ()

    # Any: typer's class is click's or its own copy of it, by version.
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {
            name: (parameter.opts[0] if name in parameter.opts else name, bool(getattr(parameter, "is_flag", False)))
            for parameter in self.get_params(ctx)
            if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        reader = Reader(self.tables, own)
        with clear_errors():
            args = reader.read(args)
        ctx.meta[_IGNORED] = reader.ignored
        return super().parse_args(ctx, args)


def _is_option(word: str) -> bool:
    return word.startswith("-") and len(word) > 1 and not _NUMBER.fullmatch(word)


def _with_value(value: str | None, rest: list[str]) -> list[str]:
    """The rest of the line itself, with the value before it that stood after an equals sign."""
    if value is not None:
        rest.insert(0, value)
    return rest


def _refusal(table: OptionTable, name: str) -> ConfigError:
    return ConfigError(f"{name} of {table.program} is not taken here: {table.refused[name]}")
