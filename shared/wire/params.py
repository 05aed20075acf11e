"""Sampling parameters and modes: protobuf to plain values and back."""

from __future__ import annotations

from functools import lru_cache

from outrider.shared.sampling_params import SamplingParams, SpeculationMode
from outrider.shared.wire.fields import from_message, to_message
from outrider.v1 import common_pb2 as common

# requests; cached long lists, with at most 16,384 tokens of bad words each (gateway/openai/convert.py)
_NUM_LISTS = 16
MODE_TO_WIRE = {
    SpeculationMode.EXACT: common.SPECULATION_MODE_EXACT,
    SpeculationMode.REJECTION: common.SPECULATION_MODE_REJECTION,
}
MODE_FROM_WIRE = {wire: mode for mode, wire in MODE_TO_WIRE.items()}
# Fields written and read separately: they are long, and all outputs of a request share them.
_LISTS = ("bad_words", "logit_bias")


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
