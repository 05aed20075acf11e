"""Field types of the OpenAI schema: each accepts what JSON clients send and explains what is wrong.

JSON has one number type, so 5.0 is a whole number here; true is not 1 and "5" is not 5. Messages follow the field's
name: "temperature must be a number, got a string".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, PlainValidator, WithJsonSchema

# 64-bit signed maximum for all fields but seed, which has its own check
_MAX_INT = 2**63 - 1
_MAX_SEED = 2**64 - 1
# wrong keys of an object that an error names; more would not be read
_MAX_SHOWN_KEYS = 8

PromptInput = str | tuple[int, ...]


def json_kind(value: object) -> str:
    """Returns the name of a JSON value's type."""
    match value:
        case None:
            return "null"
        case bool():
            return "a boolean"
        case int() | float():
            return "a number"
        case str():
            return "a string"
        case list() | tuple():
            return "a list"
        case _:
            return "an object"


def whole_number(value: object) -> int:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        shown = value if isinstance(value, float) else json_kind(value)
        raise ValueError(f"must be a whole number, got {shown}")
    if not -_MAX_INT - 1 <= value <= _MAX_SEED:
        raise ValueError("must be a 64-bit number")
    return value


def number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"must be a number, got {json_kind(value)}")
    if isinstance(value, int) and abs(value) > _MAX_SEED:
        raise ValueError("must be a 64-bit number")
    if not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {value}")
    return float(value)


def boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, got {json_kind(value)}")
    return value


def string(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"must be a string, got {json_kind(value)}")
    return value


def _list(value: object) -> list[Any]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a list, got {json_kind(value)}")
    return list(value)


def _each(value: object, convert: Callable[[object], Any]) -> tuple[Any, ...]:
    entries = _list(value)
    for place, entry in enumerate(entries):
        try:
            entries[place] = convert(entry)
        except ValueError as error:
            raise ValueError(f"entry {place} {error}") from None
    return tuple(entries)


def _whole_numbers(value: object) -> tuple[int, ...]:
    return _each(value, whole_number)


def _strings(value: object) -> tuple[str, ...]:
    return _each(value, string)


def _string_or_strings(value: object) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a string or a list of strings, got {json_kind(value)}")
    return _strings(value)


def _logit_bias(value: object) -> dict[int, float]:
    """Parses the biases. JSON object keys are strings; each must spell a token id."""
    if not isinstance(value, Mapping):
        raise ValueError(f"must be an object of token ids and numbers, got {json_kind(value)}")
    entries = {str(key): bias for key, bias in value.items()}
    wrong = [text for text in entries if not (text.isascii() and text.isdigit() and len(text) <= 10)]
    if wrong:
        shown = ", ".join(repr(text[:40]) for text in wrong[:_MAX_SHOWN_KEYS])
        raise ValueError(f"must have token ids as keys, got {shown}")
    biases: dict[int, float] = {}
    for text, bias in entries.items():
        try:
            biases[int(text)] = number(bias)
        except ValueError as error:
            raise ValueError(f"of token {text} {error}") from None
    return biases


def _prompts(value: object) -> tuple[PromptInput, ...]:
    """Returns one entry per prompt: text, or token ids."""
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a string, a list of strings or token ids, got {json_kind(value)}")
    if not value:
        raise ValueError("must not be empty")
    first = value[0]
    if isinstance(first, str):
        return _strings(value)
    if isinstance(first, list | tuple):
        return _each(value, _whole_numbers)
    if isinstance(first, int | float) and not isinstance(first, bool):
        return (_whole_numbers(value),)
    raise ValueError(f"must be a string, a list of strings or token ids, but entry 0 is {json_kind(first)}")


def _object(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, got {json_kind(value)}")
    return value


_INTEGERS = {"type": "array", "items": {"type": "integer"}}
_STRINGS = {"type": "array", "items": {"type": "string"}}

Int = Annotated[int, BeforeValidator(whole_number)]
Number = Annotated[float, BeforeValidator(number)]
Bool = Annotated[bool, BeforeValidator(boolean)]
String = Annotated[str, BeforeValidator(string)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_whole_numbers), WithJsonSchema(_INTEGERS)]
Strings = Annotated[tuple[str, ...], PlainValidator(_strings), WithJsonSchema(_STRINGS)]
StringOrStrings = Annotated[
    tuple[str, ...],
    PlainValidator(_string_or_strings),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]}),
]
LogitBias = Annotated[
    dict[int, float],
    PlainValidator(_logit_bias),
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number"}}),
]
Prompts = Annotated[
    tuple[PromptInput, ...],
    PlainValidator(_prompts),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _INTEGERS, {"type": "array", "items": _INTEGERS}]}),
]
JsonObject = Annotated[dict[str, Any], PlainValidator(_object), WithJsonSchema({"type": "object"})]
