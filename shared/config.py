"""Loads every service's frozen config: from flag, else environment variable, else default.

A field's flag is its name with hyphens, its variable OUTRIDER_ plus its name in capitals; `--no-NAME` sets a switch to
false. Fields are declared with `setting(...)`, which documents each in `--help`. Nothing is read at import.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, get_type_hints

from outrider.shared.errors import ConfigError

ENV_PREFIX = "OUTRIDER_"
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}

ConfigT = TypeVar("ConfigT")


def setting(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] = (),
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """A dataclass field with its help text and limits."""
    metadata = {"help": help, "choices": tuple(choices), "minimum": minimum, "maximum": maximum}
    return dataclasses.field(default=default, metadata=metadata)


def load_config(
    config_type: type[ConfigT],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    description: str,
    epilog: str = "",
) -> ConfigT:
    """Parses a config from argv and environ. Raises ConfigError that names the variable and its choices.

    `--help` prints and exits as usual.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fields = {field.name: field for field in dataclasses.fields(config_type)}  # type: ignore[arg-type]
    types = get_type_hints(config_type)
    for name, field in fields.items():
        choices = field.metadata.get("choices")
        tail = f" Choices: {', '.join(choices)}." if choices else ""
        off = f"--no-{name.replace('_', '-')}" if types[name] in _SWITCHES else ""
        if off:
            tail += f" {off} turns it off."
        shown = "none" if field.default == "" else "auto" if field.default is None else field.default
        parser.add_argument(
            _flag(name),
            dest=name,
            metavar="VALUE",
            help=f"{field.metadata.get('help', '')}{tail} (default: {shown}; ${_variable(name)})".replace("%", "%%"),
        )
        if off:
            parser.add_argument(off, dest=name, action="store_const", const="false", help=argparse.SUPPRESS)
    given = vars(parser.parse_args(argv))
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if given[name] is not None:
            values[name] = _parse(_flag(name), given[name], types[name], field)
        elif _variable(name) in environ:
            values[name] = _parse(_variable(name), environ[_variable(name)], types[name], field)
    return config_type(**values)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return ENV_PREFIX + name.upper()


def _parse(source: str, text: str, kind: Any, field: dataclasses.Field[Any]) -> Any:
    parse = _PARSERS.get(kind)
    if parse is None:
        raise ConfigError(f"{source}: settings of type {kind} cannot be read from text")
    try:
        value = parse(text)
    except ValueError:
        raise ConfigError(f"{source}: {text!r} is not {_KIND_NAMES[kind]}") from None
    choices = field.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{source}: {text!r} is not one of {', '.join(choices)}")
    minimum, maximum = field.metadata.get("minimum"), field.metadata.get("maximum")
    if value is None:
        return None
    # Written so that NaN fails too.
    if minimum is not None and not value >= minimum:
        raise ConfigError(f"{source}: {text} is below the minimum, {minimum:g}")
    if maximum is not None and not value <= maximum:
        raise ConfigError(f"{source}: {text} is above the maximum, {maximum:g}")
    return value


def _parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in _TRUE:
        return True
    if lowered in _FALSE:
        return False
    raise ValueError(text)


def _parse_auto_bool(text: str) -> bool | None:
    return None if text.lower() == "auto" else _parse_bool(text)


def _parse_auto_int(text: str) -> int | None:
    return None if text.lower() == "auto" else int(text)


def _parse_tuple(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


_PARSERS: dict[Any, Callable[[str], Any]] = {
    str: str,
    int: int,
    int | None: _parse_auto_int,
    float: float,
    bool: _parse_bool,
    bool | None: _parse_auto_bool,
    tuple[str, ...]: _parse_tuple,
}
_KIND_NAMES: dict[Any, str] = {
    str: "text",
    int: "a whole number",
    int | None: "auto or a whole number",
    float: "a number",
    bool: "true or false",
    bool | None: "auto, true or false",
    tuple[str, ...]: "a comma-separated list",
}
_SWITCHES = (bool, bool | None)
