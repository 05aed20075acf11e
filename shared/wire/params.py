"""Sampling parameters and modes: protobuf to plain values and back."""

from __future__ import annotations

from functools import lru_cache

from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import Grammar, GrammarKind, SamplingParams, SpeculationMode, ThinkingBudget
from outrider.v1 import common_pb2 as common

# requests; whose long lists are kept; at most 16,384 tokens of bad words each (gateway/openai/convert.py)
_NUM_LISTS = 16
MODE_TO_WIRE = {
    SpeculationMode.EXACT: common.SPECULATION_MODE_EXACT,
    SpeculationMode.REJECTION: common.SPECULATION_MODE_REJECTION,
}
MODE_FROM_WIRE = {wire: mode for mode, wire in MODE_TO_WIRE.items()}
_GRAMMAR_TO_WIRE = {
    GrammarKind.JSON_SCHEMA: common.Grammar.KIND_JSON_SCHEMA,
    GrammarKind.JSON_OBJECT: common.Grammar.KIND_JSON_OBJECT,
    GrammarKind.REGEX: common.Grammar.KIND_REGEX,
    GrammarKind.CHOICE: common.Grammar.KIND_CHOICE,
    GrammarKind.LARK: common.Grammar.KIND_LARK,
}
_GRAMMAR_FROM_WIRE = {wire: kind for kind, wire in _GRAMMAR_TO_WIRE.items()}


def mode_from_wire(mode: common.SpeculationMode.ValueType) -> SpeculationMode | None:
    return MODE_FROM_WIRE.get(mode)


def params_to_wire(params: SamplingParams) -> common.SamplingParams:
    message = common.SamplingParams()
    write_params(message, params)
    return message


def write_params(message: common.SamplingParams, params: SamplingParams) -> None:
    """Into an empty message, such as a field of another one: long lists are not copied."""
    message.MergeFrom(
        common.SamplingParams(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            seed=params.seed,
            max_tokens=params.max_tokens,
            min_tokens=params.min_tokens,
            stop_token_ids=params.stop_token_ids,
            ignore_eos=params.ignore_eos,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            allowed_token_ids=params.allowed_token_ids,
            num_logprobs=params.num_logprobs,
            num_prompt_logprobs=params.num_prompt_logprobs,
            logprob_token_ids=params.logprob_token_ids,
        )
    )
    if params.bad_words or params.logit_bias:
        message.MergeFromString(_lists_to_wire(params.bad_words, params.logit_bias))
    if params.grammar is not None:
        message.grammar.kind = _GRAMMAR_TO_WIRE[params.grammar.kind]
        message.grammar.text = params.grammar.text
    if params.thinking_budget is not None:
        message.thinking_budget.CopyFrom(_budget_to_wire(params.thinking_budget))


def params_from_wire(message: common.SamplingParams) -> SamplingParams:
    """Absent numbers whose default is not 0 take their default. Raises InvalidRequest on a broken grammar."""
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        min_p=message.min_p,
        seed=message.seed if message.HasField("seed") else None,
        max_tokens=message.max_tokens or SamplingParams.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=tuple(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=tuple(sorted(message.logit_bias.items())),
        bad_words=_bad_words_from_wire(_without_seed(message)) if message.bad_words else (),
        allowed_token_ids=tuple(message.allowed_token_ids),
        num_logprobs=message.num_logprobs if message.HasField("num_logprobs") else None,
        num_prompt_logprobs=message.num_prompt_logprobs if message.HasField("num_prompt_logprobs") else None,
        logprob_token_ids=tuple(message.logprob_token_ids),
        grammar=_grammar_from_wire(message.grammar) if message.HasField("grammar") else None,
        thinking_budget=(_budget_from_wire(message.thinking_budget) if message.HasField("thinking_budget") else None),
    )


# The lists of one request travel once for each of its outputs; 1,024 bad words take a millisecond to build or to read.
@lru_cache(maxsize=_NUM_LISTS)
def _lists_to_wire(bad_words: tuple[tuple[int, ...], ...], logit_bias: tuple[tuple[int, float], ...]) -> bytes:
    message = common.SamplingParams(bad_words=[common.TokenSequence(token_ids=word) for word in bad_words])
    for token_id, bias in logit_bias:
        message.logit_bias[token_id] = bias
    return message.SerializeToString()


def _without_seed(message: common.SamplingParams) -> bytes:
    """What requests with the same lists have in common. Copying takes six times as long as encoding."""
    if not message.HasField("seed"):
        return message.SerializeToString()
    copy = common.SamplingParams()
    copy.CopyFrom(message)
    copy.ClearField("seed")
    return copy.SerializeToString()


@lru_cache(maxsize=_NUM_LISTS)
def _bad_words_from_wire(encoded: bytes) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(word.token_ids) for word in common.SamplingParams.FromString(encoded).bad_words)


def _budget_to_wire(budget: ThinkingBudget) -> common.ThinkingBudget:
    return common.ThinkingBudget(
        max_tokens=budget.max_tokens,
        end_token_id=budget.end_token_id,
        begin_token_ids=budget.begin_token_ids,
        call_token_ids=budget.call_token_ids,
        starts_open=budget.starts_open,
    )


def _budget_from_wire(message: common.ThinkingBudget) -> ThinkingBudget:
    return ThinkingBudget(
        max_tokens=message.max_tokens,
        end_token_id=message.end_token_id,
        begin_token_ids=tuple(message.begin_token_ids),
        call_token_ids=tuple(message.call_token_ids),
        starts_open=message.starts_open,
    )


def _grammar_from_wire(message: common.Grammar) -> Grammar:
    if message.kind not in _GRAMMAR_FROM_WIRE:
        raise InvalidRequest(f"grammar: unknown kind {message.kind}", param="grammar")
    grammar = Grammar(_GRAMMAR_FROM_WIRE[message.kind], message.text)
    if grammar.kind is GrammarKind.CHOICE:
        grammar.choices()
    elif grammar.kind is GrammarKind.JSON_SCHEMA:
        grammar.json_schema()
    return grammar
