"""Messages that both services read: parameters, the opening of a session, hidden states, timings, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from functools import lru_cache
from operator import attrgetter

from outrider.shared import messages as m
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.shared.wire.fields import from_message, to_message
from outrider.v1 import common_pb2 as common
from outrider.v1 import drafter_pb2 as drafter
from outrider.v1 import verifier_pb2 as verifier

# requests; cached long lists, with at most 16,384 tokens of bad words each (gateway/openai/convert.py)
_NUM_LISTS = 16
MODE_TO_WIRE = {
    SpeculationMode.EXACT: common.SPECULATION_MODE_EXACT,
    SpeculationMode.REJECTION: common.SPECULATION_MODE_REJECTION,
}
MODE_FROM_WIRE = {wire: mode for mode, wire in MODE_TO_WIRE.items()}
# Fields written and read separately: they are long, and all outputs of a request share them.
_LISTS = ("bad_words", "logit_bias")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_timings_in_order = attrgetter(*(entry.name for entry in fields(m.Timings)))


# ---- parameters ----


def params_to_wire(params: SamplingParams) -> common.SamplingParams:
    message = common.SamplingParams()
    write_params(message, params)
    return message


def write_params(message: common.SamplingParams, params: SamplingParams) -> None:
    """Writes into an empty message, such as a field of another one: long lists are not copied."""
    to_message(message, params, skipped=_LISTS)
    if params.bad_words or params.logit_bias:
        message.MergeFromString(_lists_to_wire(params.bad_words, params.logit_bias))


def params_from_wire(message: common.SamplingParams) -> SamplingParams:
    """Absent numbers whose default is not 0 take their default, but the temperature. Raises InvalidRequest on a broken
    grammar.
    """
    params = from_message(
        SamplingParams,
        message,
        skipped=_LISTS,
        temperature=0.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=_bad_words_from_wire(_without_seed(message)) if message.bad_words else (),
    )
    if params.grammar is not None:
        params.grammar.check_text()
    return params


# The lists of one request travel once for each of its outputs; 1,024 bad words take a millisecond to build or to read.
@lru_cache(maxsize=_NUM_LISTS)
def _lists_to_wire(bad_words: tuple[tuple[int, ...], ...], logit_bias: tuple[tuple[int, float], ...]) -> bytes:
    message = common.SamplingParams(bad_words=[common.TokenSequence(token_ids=word) for word in bad_words])
    for token_id, bias in logit_bias:
        message.logit_bias[token_id] = bias
    return message.SerializeToString()


def _without_seed(message: common.SamplingParams) -> bytes:
    """Encodes a message without its seed, so that requests with the same lists share a cache entry.

    Copying takes six times as long as encoding.
    """
    if not message.HasField("seed"):
        return message.SerializeToString()
    copy = common.SamplingParams()
    copy.CopyFrom(message)
    copy.ClearField("seed")
    return copy.SerializeToString()


@lru_cache(maxsize=_NUM_LISTS)
def _bad_words_from_wire(encoded: bytes) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(word.token_ids) for word in common.SamplingParams.FromString(encoded).bad_words)


# ---- the opening of a session ----


def open_verifier(spec: m.SessionSpec) -> verifier.VerifierRequest:
    request = verifier.VerifierRequest()
    _write(request.open, spec, skipped="method")
    return request


def open_drafter(spec: m.SessionSpec) -> drafter.DrafterRequest:
    request = drafter.DrafterRequest()
    _write(request.open, spec, skipped="numerics")
    return request


def _write(
    message: verifier.OpenVerifierSession | drafter.OpenDrafterSession, spec: m.SessionSpec, *, skipped: str
) -> None:
    write_params(message.sampling_params, spec.sampling_params)
    to_message(message, spec, skipped=(skipped, "sampling_params"))


def spec_from_wire(message: verifier.OpenVerifierSession | drafter.OpenDrafterSession) -> m.SessionSpec:
    """Parses a session's spec. Raises InvalidRequest when the id, the prompt or the mode is missing."""
    if not message.session_id:
        raise InvalidRequest("open: session_id is empty", param="session_id")
    if not message.prompt_token_ids:
        raise InvalidRequest("open: prompt_token_ids is empty", param="prompt_token_ids")
    params = params_from_wire(message.sampling_params)
    params.validate()
    speculation = from_message(Speculation, message.speculation)
    speculation.validate()
    given = {"sampling_params": params, "speculation": speculation}
    return from_message(m.SessionSpec, message, skipped=given, **given)


# ---- what comes back ----


def hidden_to_wire(hidden: m.HiddenStates) -> common.HiddenStates:
    return common.HiddenStates(**vars(hidden))


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


def timings_from_wire(message: common.Timings) -> m.Timings:
    return m.Timings(*_timings_in_order(message))
