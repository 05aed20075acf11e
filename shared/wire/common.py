"""Hidden states and timings, which both services send, and log-probabilities, which the log and clients get too."""

from __future__ import annotations

from collections.abc import Iterable

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.v1 import common_pb2 as common


def hidden_to_wire(hidden: m.HiddenStates) -> common.HiddenStates:
    return common.HiddenStates(
        first_index=hidden.first_index,
        layers=hidden.layers,
        num_rows=hidden.num_rows,
        width=hidden.width,
        dtype=hidden.dtype,
        data=hidden.data,
    )


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
    return common.TokenLogprob(
        logprob=entry.logprob,
        rank=entry.rank,
        top_token_ids=entry.top_token_ids,
        top_logprobs=entry.top_logprobs,
    )


def logprobs_from_wire(entries: Iterable[common.TokenLogprob]) -> tuple[m.TokenLogprob, ...]:
    return tuple(
        m.TokenLogprob(entry.logprob, entry.rank, tuple(entry.top_token_ids), tuple(entry.top_logprobs))
        for entry in entries
    )


def timings_to_wire(timings: m.Timings) -> common.Timings:
    return common.Timings(
        queue_us=timings.queue_us,
        forward_us=timings.forward_us,
        total_us=timings.total_us,
        sample_us=timings.sample_us,
        batch_sessions=timings.batch_sessions,
        open_sessions=timings.open_sessions,
        draft_us=timings.draft_us,
    )


def timings_from_wire(message: common.Timings) -> m.Timings:
    return m.Timings(
        queue_us=message.queue_us,
        forward_us=message.forward_us,
        total_us=message.total_us,
        sample_us=message.sample_us,
        batch_sessions=message.batch_sessions,
        open_sessions=message.open_sessions,
        draft_us=message.draft_us,
    )
