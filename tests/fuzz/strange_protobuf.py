"""Messages of any type with any value in any field: valid protobuf that mostly makes no sense.

`around(message)` changes a few fields of a message that does make sense, so that what is behind the first check is
reached too. Generated from the descriptors: a field that is added to a .proto is fuzzed from then on.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

M = TypeVar("M", bound=Message)

_KIND = FieldDescriptor
_WORDS = ("", "draft_model", "ngram", "auto", "off", "float32", "bfloat16", "raw", "user", "demo-target", "a", "\x00")
_MOST_DEPTH = 4


def _integers(low: int, high: int) -> st.SearchStrategy[int]:
    edges = [value for value in (0, 1, -1, low, high, 2**31 - 1, 4095, 4096, 65536, 2**40) if low <= value <= high]
    small = st.integers(max(low, -3), 50)
    return st.one_of(small, st.sampled_from(edges), st.integers(low, high))


_FLOATS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, 0.5, 2.0, -1.0, 1e-5, 1e-300, 1e300, math.inf, -math.inf, math.nan]),
    st.floats(-3, 3),
)
_TEXTS = st.sampled_from(_WORDS) | st.text(st.characters(codec="utf-8"), max_size=12)
_SCALARS: dict[int, st.SearchStrategy[Any]] = {
    **dict.fromkeys((_KIND.TYPE_INT32, _KIND.TYPE_SINT32, _KIND.TYPE_SFIXED32), _integers(-(2**31), 2**31 - 1)),
    **dict.fromkeys((_KIND.TYPE_INT64, _KIND.TYPE_SINT64, _KIND.TYPE_SFIXED64), _integers(-(2**63), 2**63 - 1)),
    **dict.fromkeys((_KIND.TYPE_UINT32, _KIND.TYPE_FIXED32), _integers(0, 2**32 - 1)),
    **dict.fromkeys((_KIND.TYPE_UINT64, _KIND.TYPE_FIXED64), _integers(0, 2**64 - 1)),
    _KIND.TYPE_DOUBLE: _FLOATS,
    _KIND.TYPE_FLOAT: _FLOATS,
    _KIND.TYPE_BOOL: st.booleans(),
    _KIND.TYPE_STRING: _TEXTS,
    _KIND.TYPE_BYTES: st.binary(max_size=24),
    # Open enums: any number may stand there.
    _KIND.TYPE_ENUM: st.integers(0, 6) | _integers(-(2**31), 2**31 - 1),
}


@st.composite
def strange(draw: st.DrawFn, kind: type[M], depth: int = 0) -> M:
    """Any fields, any values."""
    message = kind()
    fields = _fields(message)
    if fields:
        for field in draw(st.lists(st.sampled_from(fields), max_size=6, unique_by=lambda field: field.name)):
            _fill(draw, message, field, depth)
    return message


@st.composite
def around(draw: st.DrawFn, good: M, depth: int = 0) -> M:
    """`good` with up to three strange fields, anywhere in it."""
    message = type(good)()
    message.CopyFrom(good)
    for _ in range(draw(st.integers(0, 3)) if type(good).DESCRIPTOR.fields else 0):
        inner, level = message, depth
        field = draw(st.sampled_from(_fields(inner)))
        while _is_single_message(field) and inner.HasField(field.name) and draw(st.integers(0, 4)):
            inner, level = getattr(inner, field.name), level + 1
            field = draw(st.sampled_from(_fields(inner)))
        inner.ClearField(field.name)
        _fill(draw, inner, field, level)
    return message


def _fields(message: Message) -> list[FieldDescriptor]:
    fields: Any = message.DESCRIPTOR.fields  # the stubs know two kinds of them
    return list(fields)


def _is_single_message(field: FieldDescriptor) -> bool:
    return field.message_type is not None and not field.is_repeated


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    held: Any = getattr(message, field.name)
    if field.message_type is None:
        if field.is_repeated:
            held.extend(draw(st.lists(_SCALARS[field.type], max_size=6)))
        else:
            setattr(message, field.name, draw(_SCALARS[field.type]))
    elif field.message_type.GetOptions().map_entry:
        _fill_map(draw, held, field.message_type, depth)
    elif depth < _MOST_DEPTH:
        kind: type[Message] = GetMessageClass(field.message_type)
        if field.is_repeated:
            held.extend(draw(st.lists(strange(kind, depth + 1), max_size=3)))
        else:
            held.CopyFrom(draw(strange(kind, depth + 1)))
            held.SetInParent()


def _fill_map(draw: st.DrawFn, held: Any, entry: Descriptor, depth: int) -> None:
    key, value = entry.fields_by_name["key"], entry.fields_by_name["value"]
    for place in draw(st.lists(_SCALARS[key.type], max_size=4)):
        held[place] = draw(_SCALARS[value.type])
