"""Copies a dataclass to the message that has the same field names, and back, so that a new field is named in two files.

For values that travel once per session or less; what travels in each round is written out (common, verifier, drafter)
or, where all is plain, copied by `same_fields`.
"""

from __future__ import annotations

import enum
from collections.abc import Collection
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from google.protobuf.descriptor import EnumDescriptor
from google.protobuf.message import Message

from outrider.shared.errors import InvalidRequest

T = TypeVar("T")
MessageT = TypeVar("MessageT", bound=Message)


def same_fields(kind: type[MessageT], value: Any) -> MessageT | None:
    """Copies a dataclass whose fields are numbers, text, bytes and tuples of numbers; None stays None."""
    return None if value is None else kind(**vars(value))


def to_message(message: MessageT, value: Any, *, skipped: Collection[str] = ()) -> MessageT:
    """Writes the fields of a dataclass into an empty message and returns it; None is absent."""
    for entry in fields(value):
        name, given = entry.name, getattr(value, entry.name)
        if given is None or name in skipped:
            continue
        descriptor = message.DESCRIPTOR.fields_by_name[name]
        if descriptor.message_type is not None and isinstance(given, tuple):
            for item in given:
                to_message(getattr(message, name).add(), item)
        elif descriptor.message_type is not None:
            getattr(message, name).SetInParent()
            to_message(getattr(message, name), given)
        elif descriptor.enum_type is not None:
            text = given.value if isinstance(given, enum.Enum) else given
            setattr(message, name, _numbers(descriptor.enum_type)[text])
        elif isinstance(given, tuple):
            getattr(message, name).extend(given)
        else:
            setattr(message, name, given)
    return message


def from_message(kind: type[T], message: Message, *, skipped: Collection[str] = (), **absent: Any) -> T:
    """Reads a dataclass from a message. Raises InvalidRequest for an enum's number that has no name here.

    An absent field is as in `absent`; else the dataclass's default counts, or without one, and for a bool, the wire's.
    """
    made: Any = kind
    shape = _shape(made)
    found = {name: getattr(message, name) for name in shape.always_read}
    found.update({descriptor.name: value for descriptor, value in message.ListFields()})
    descriptors = message.DESCRIPTOR.fields_by_name
    for name, value in found.items():
        if name in shape.kinds and name not in skipped:
            absent[name] = _value(shape.kinds[name], descriptors[name], value)
    return kind(**absent)


def _value(kind: Any, descriptor: Any, value: Any) -> Any:
    if descriptor.enum_type is not None:
        for name, number in _numbers(descriptor.enum_type).items():
            if number == value and (name or kind is str):
                return kind(name)
        raise InvalidRequest(f"{descriptor.name}: {value} stands for nothing", param=descriptor.name)
    if descriptor.message_type is None:
        return tuple(value) if kind is tuple else value
    try:
        if isinstance(value, Message):
            return from_message(kind, value)
        return tuple(from_message(kind, item) for item in value)
    except InvalidRequest as refused:
        raise InvalidRequest(f"{descriptor.name}: {refused.message}", param=descriptor.name) from None


@cache
def _numbers(descriptor: EnumDescriptor) -> dict[str, int]:
    """Maps an enum's names, in lower case without their common prefix, to numbers; ..._UNSPECIFIED becomes ""."""
    prefix = descriptor.values[0].name.removesuffix("UNSPECIFIED")
    names = {value.name.removeprefix(prefix).lower(): value.number for value in descriptor.values[1:]}
    return {"": 0, **names}


@dataclass(frozen=True)
class _Shape:
    """A dataclass's fields as the wire needs them.

    kinds: type of each field; that of X | None is X, of a tuple `tuple` or its dataclass. always_read: fields that are
    read even if absent.
    """

    kinds: dict[str, Any]
    always_read: tuple[str, ...]


@cache
def _shape(kind: Any) -> _Shape:
    hints = get_type_hints(kind)
    required = [entry.name for entry in fields(kind) if entry.default is MISSING and entry.default_factory is MISSING]
    return _Shape(
        kinds={name: _bare(hint) for name, hint in hints.items()},
        always_read=tuple(name for name, hint in hints.items() if hint is bool or name in required),
    )


def _bare(hint: Any) -> Any:
    if isinstance(hint, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not type(None))
    if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
        return get_args(hint)[0]
    return get_origin(hint) or hint
