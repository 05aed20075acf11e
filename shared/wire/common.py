"""Hidden states and timings, which both services send, and log-probabilities, which the log and clients get too."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from operator import attrgetter

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.v1 import common_pb2 as common


def hidden_to_wire(hidden: m.HiddenStates) -> common.HiddenStates:
    return common.HiddenStates(**vars(hidden))


_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def hidden_from_wire(message: common.HiddenStates) -> m.HiddenStates:
    """Parses hidden states. Raises InvalidRequest when the bytes do not fit the shape."""
    item_bytes = _DTYPE_BYTES.get(message.dtype)
    if item_bytes is None:
        raise InvalidRequest(f"hidden_states: unknown dtype {message.dtype!r}", param="hidden_states")
    expected = len(message.layers) * message.num_rows * message.width * item_bytes
    if message.num_rows < 0 or message.width < 0 or len(message.data) != expected:
        raise InvalidRequest(
            f"hidden_states: {len(message.data)} bytes where the shape needs {expected}",
            param="hidden_states",
        )
    return m.HiddenStates(
        first_index=message.first_index,
        layers=tuple(message.layers),
        num_rows=message.num_rows,
        width=message.width,
        dtype=message.dtype,
        data=message.data,
    )


def logprob_to_wire(entry: m.TokenLogprob) -> common.TokenLogprob:
    return common.TokenLogprob(**vars(entry))


def logprobs_from_wire(entries: Iterable[common.TokenLogprob]) -> tuple[m.TokenLogprob, ...]:
    return tuple(
        m.TokenLogprob(entry.logprob, entry.rank, tuple(entry.top_token_ids), tuple(entry.top_logprobs))
        for entry in entries
    )


def timings_to_wire(timings: m.Timings) -> common.Timings:
    return common.Timings(**vars(timings))


_timings_in_order = attrgetter(*(entry.name for entry in fields(m.Timings)))


def timings_from_wire(message: common.Timings) -> m.Timings:
    return m.Timings(*_timings_in_order(message))
