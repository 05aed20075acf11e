"""Parsed bodies to ValidRequests: every check that needs the model, the tokenizer or the limits.

Not here: the shape of the bodies (schema.py) and the ranges of sampling parameters (shared/sampling_params.py).
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from outrider.gateway.openai.chat_plan import ChatPlan, chat_prompt
from outrider.gateway.openai.checks import (
    check_model,
    check_prompt,
    check_prompt_chars,
    check_speculation,
    check_stop,
    output_budget,
    predicted_tokens,
    truncate_prompt,
)
from outrider.gateway.openai.fill_in_middle import with_suffix
from outrider.gateway.openai.grammar_fields import grammar_of
from outrider.gateway.openai.schema import (
    ChatCompletionRequest,
    ChatFields,
    CompletionRequest,
    GenerationFields,
    Prediction,
)
from outrider.gateway.request.answers import AnswerOptions, Prepared
from outrider.gateway.request.served import RequestLimits, Served, ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import ValidRequest
from outrider.shared.errors import InvalidRequest
from outrider.shared.request_params import Speculation
from outrider.shared.sampling_params import MAX_LOGPROBS, SamplingParams, SpeculationMode

# tokens; OpenAI's default for /v1/completions; a chat may fill the context, or has its model's sampling default
DEFAULT_COMPLETION_TOKENS = 16
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_MAX_SALT_CHARS = 256
_MAX_BAD_WORDS = 1024
# tokens and biases; a request's lists times its outputs, each of which sends them to a verifier: 1 us an entry
_MAX_REPEATED = 131_072


def prepare_completion(body: CompletionRequest, served: Served) -> Prepared:
    """Raises InvalidRequest or UnknownModel."""
    check_model(body.model, served.model)
    options = _options(body, served, "cmpl-", chat=False)
    num_logprobs = _num_logprobs("logprobs", body.logprobs)
    if body.max_tokens == 0 and not body.echo:
        raise InvalidRequest("max_tokens must be at least 1, or 0 together with echo", param="max_tokens")
    drop_output = body.max_tokens == 0
    if drop_output and body.logprob_token_ids:
        raise InvalidRequest("logprob_token_ids needs output tokens, and max_tokens is 0", param="logprob_token_ids")
    options = replace(options, num_logprobs=num_logprobs, drop_output=drop_output)
    if body.suffix:
        body = with_suffix(body, body.suffix, served.tokenizer)
    if body.echo and num_logprobs is not None:
        body = body.model_copy(update={"prompt_logprobs": body.prompt_logprobs or num_logprobs})
    if drop_output:
        body = body.model_copy(update={"max_tokens": 1})
    # Before the texts are tokenized, which is what takes long.
    _check_counts(body.n, len(body.prompt), served.limits)
    if body.truncate_prompt_tokens is None:
        for prompt in body.prompt:
            if isinstance(prompt, str):
                check_prompt_chars(prompt, served.tokenizer, served.model, "prompt")
    prompts = [
        served.tokenizer.encode(prompt, body.add_special_tokens) if isinstance(prompt, str) else list(prompt)
        for prompt in body.prompt
    ]
    prepared = _prepare(body, prompts, "prompt", num_logprobs, options, served)
    if not body.echo:
        return prepared
    texts = tuple(
        prompt
        if isinstance(prompt, str) and len(request.prompt_token_ids) == len(token_ids)
        # A text that was truncated; or token ids, whose echo shows special tokens whatever the output does, as in vLLM.
        else served.tokenizer.decode(request.prompt_token_ids, isinstance(prompt, str) and body.skip_special_tokens)
        for prompt, token_ids, request in zip(body.prompt, prompts, prepared.requests, strict=True)
    )
    return replace(prepared, options=replace(options, echo_texts=texts))


def prepare_chat(
    body: ChatCompletionRequest, served: Served, id_prefix: str = "chatcmpl-", *, as_message: bool = False
) -> Prepared:
    """Validates a chat request. id_prefix: how the answer's id begins. as_message: the answer is one of /v1/messages,
    where max_tokens is cut to the room that the prompt leaves. Raises InvalidRequest or UnknownModel.
    """
    check_model(body.model, served.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")
    num_logprobs = _num_logprobs("top_logprobs", body.top_logprobs or 0) if body.logprobs else None
    options = _options(body, served, id_prefix, chat=True)
    options = replace(options, num_logprobs=num_logprobs, message=as_message)
    if body.echo:
        options = replace(options, echo_texts=(_own_last_message(body),))
    text = chat_prompt(body, served.tokenizer)
    plan = ChatPlan.of(body, served, text)
    most_in = served.model if body.truncate_prompt_tokens is None else None
    prompt = _encoded(text, body, served.tokenizer, most_in)
    return plan.applied_to(_prepare(body, [prompt], "messages", num_logprobs, options, served), served)


def _own_last_message(body: ChatCompletionRequest) -> str:
    """Returns the message that the answer continues; empty if the last message has another role, as in vLLM."""
    last = body.messages[-1]
    return str(last["content"]) if last["role"] == "assistant" else ""


def chat_token_ids(body: ChatFields, tokenizer: Tokenizer, most_in: ServedModel | None = None) -> list[int]:
    """Returns the prompt's tokens. `most_in`: refuses what cannot fit that model's context before it is tokenized."""
    return _encoded(chat_prompt(body, tokenizer), body, tokenizer, most_in)


def _encoded(text: str, body: ChatFields, tokenizer: Tokenizer, most_in: ServedModel | None) -> list[int]:
    if most_in is not None:
        check_prompt_chars(text, tokenizer, most_in, "messages")
    return tokenizer.encode(text, body.add_special_tokens)


def _options(body: GenerationFields, served: Served, id_prefix: str, *, chat: bool) -> AnswerOptions:
    if body.stream_options is not None and body.stream_options.model_fields_set and not body.stream:
        raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
    if body.stream and body.prompt_logprobs is not None:
        raise InvalidRequest("prompt_logprobs cannot be streamed", param="prompt_logprobs")
    request_id = body.request_id
    if request_id is not None and not REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    stream, defaults = body.stream_options, served.model.answer_defaults
    tokens_as_ids = body.return_tokens_as_token_ids
    return AnswerOptions(
        answer_id=f"{id_prefix}{request_id or uuid.uuid4().hex}",
        created=int(time.time()),
        model=served.model.name,
        chat=chat,
        stream=body.stream,
        include_usage=defaults.include_usage or (stream is not None and stream.include_usage),
        continuous_usage=defaults.include_usage
        or (stream is not None and stream.include_usage and stream.continuous_usage_stats),
        prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=body.return_token_ids,
        return_tokens_as_token_ids=defaults.return_tokens_as_token_ids if tokens_as_ids is None else tokens_as_ids,
        annotate=body.speculation is not None and body.speculation.annotate,
        receipt=body.receipt,
        tokenizer=served.tokenizer.digest if body.receipt else "",
    )


def _num_logprobs(name: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequest(f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", param=name)
    return value


def _prepare(
    body: GenerationFields,
    prompts: list[list[int]],
    prompt_name: str,
    num_logprobs: int | None,
    options: AnswerOptions,
    served: Served,
) -> Prepared:
    model, limits = served.model, served.limits
    _check_counts(body.n, len(prompts), limits)
    check_stop(body.stop, limits)
    asked = body.speculation.options() if body.speculation is not None else Speculation()
    speculation = check_speculation(asked, model)
    params = _sampling_params(body, num_logprobs, served)
    mode = SpeculationMode(speculation.mode) if speculation.mode else params.default_mode
    if options.receipt and mode is not SpeculationMode.EXACT:
        raise InvalidRequest(
            'receipt needs exact mode: a seed, temperature 0, or "speculation": {"mode": "exact"}', param="receipt"
        )
    predicted = _predicted(body.prediction, served)
    _check_repeated(params, predicted, body.n * len(prompts))
    salt = body.cache_salt or ""
    if body.cache_salt is not None and not 1 <= len(salt) <= _MAX_SALT_CHARS:
        raise InvalidRequest(f"cache_salt must have 1 to {_MAX_SALT_CHARS} characters", param="cache_salt")
    requests = []
    params_of: dict[int, SamplingParams] = {}  # by max_tokens; long lists are checked once for all prompts
    for place, prompt in enumerate(prompts):
        prompt = truncate_prompt(
            prompt, body.truncate_prompt_tokens, body.truncation_side, _asked_tokens(body) or 1, model
        )
        check_prompt(prompt, model, prompt_name)
        room = model.max_model_len - len(prompt)
        if options.message and (_asked_tokens(body) or 0) > room:
            body, options = body.model_copy(update={"max_tokens": room}), replace(options, fills_context=True)
        max_tokens = _max_tokens(body, len(prompt), options.chat, model)
        if max_tokens not in params_of:
            params_of[max_tokens] = replace(params, max_tokens=max_tokens)
            params_of[max_tokens].validate(model.vocab_size)
        suffix = f"-{place}" if len(prompts) > 1 else ""
        requests.append(
            ValidRequest(
                request_id=options.answer_id + suffix,
                prompt_token_ids=tuple(prompt),
                sampling_params=params_of[max_tokens],
                n=body.n,
                stop=body.stop,
                include_stop_str_in_output=body.include_stop_str_in_output,
                skip_special_tokens=body.skip_special_tokens,
                speculation=speculation,
                cache_salt=salt,
                predicted_token_ids=predicted,
            )
        )
    return Prepared(tuple(requests), options)


def _predicted(prediction: Prediction | None, served: Served) -> tuple[int, ...]:
    if prediction is None:
        return ()
    if prediction.type != "content":
        raise InvalidRequest("prediction.type must be content", param="prediction.type")
    return predicted_tokens(prediction.content, served.tokenizer, served.model)


def _check_repeated(params: SamplingParams, predicted: Sequence[int], num_outputs: int) -> None:
    lists = {
        "bad_words": sum(map(len, params.bad_words)),
        "logit_bias": len(params.logit_bias),
        "prediction": len(predicted),
    }
    for name, size in lists.items():
        if size * num_outputs > _MAX_REPEATED:
            raise InvalidRequest(
                f"{name} has {size} entries for each of {num_outputs} outputs, the most is {_MAX_REPEATED} in all; "
                "ask for fewer outputs at once",
                param=name,
            )


def _check_counts(n: int, num_prompts: int, limits: RequestLimits) -> None:
    if not 1 <= n <= limits.max_n:
        raise InvalidRequest(f"n must be between 1 and {limits.max_n}, got {n}", param="n")
    if n * num_prompts > limits.max_sequences:
        raise InvalidRequest(
            f"n is {n} for {num_prompts} prompts: {n * num_prompts} outputs, and one request may ask for "
            f"{limits.max_sequences}",
            param="n",
        )


def _asked_tokens(body: GenerationFields) -> int | None:
    return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens


def _max_tokens(body: GenerationFields, prompt_len: int, chat: bool, model: ServedModel) -> int:
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    default = model.sampling_defaults.max_tokens if chat else DEFAULT_COMPLETION_TOKENS
    return output_budget(_asked_tokens(body), default, prompt_len, model, name)


def _sampling_params(body: GenerationFields, num_logprobs: int | None, served: Served) -> SamplingParams:
    """Returns the parameters except max_tokens, which depends on the prompt."""
    if body.allowed_token_ids == ():
        raise InvalidRequest("allowed_token_ids must not be empty", param="allowed_token_ids")
    if body.top_k is not None and body.top_k < -1:
        raise InvalidRequest(f"top_k must be -1 (off) or at least 0, got {body.top_k}", param="top_k")
    # A nucleus of nothing is the likeliest token alone, as OpenAI has it.
    nucleus = {"temperature": 0.0, "top_p": 1.0} if body.top_p == 0 else {}
    converted = {
        **nucleus,
        "top_k": None if body.top_k is None else max(body.top_k, 0),
        "seed": _seed(body.seed),
        "stop_token_ids": tuple(dict.fromkeys(body.stop_token_ids)),
        "logit_bias": tuple(sorted((body.logit_bias or {}).items())),
        "bad_words": _bad_words(body.bad_words, served.tokenizer),
        "allowed_token_ids": tuple(sorted(set(body.allowed_token_ids or ()))),
        "num_logprobs": num_logprobs,
        "num_prompt_logprobs": body.prompt_logprobs,
        "logprob_token_ids": tuple(dict.fromkeys(body.logprob_token_ids)),
        "grammar": grammar_of(body.response_format, body.structured_outputs, served.model, served.limits),
    }
    defaults = vars(served.model.sampling_defaults)
    given: dict[str, Any] = {}
    for entry in fields(SamplingParams):
        value = converted[entry.name] if entry.name in converted else getattr(body, entry.name, None)
        value = defaults.get(entry.name) if value is None else value
        if value is not None:
            given[entry.name] = value
    return SamplingParams(**given)


def _seed(seed: int | None) -> int | None:
    """-1 is vLLM's "no seed"; the API allows other negative seeds, and modulo 2^64 keeps them apart."""
    return None if seed is None or seed == -1 else seed % 2**64


def _bad_words(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Tokenizes each word as at the start of a text and as after a space, which are different tokens."""
    if len(words) > _MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has {len(words)} entries, the most is {_MAX_BAD_WORDS}", param="bad_words")
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        if not bare:
            raise InvalidRequest("bad_words must not hold an empty string", param="bad_words")
        for text in (bare, " " + bare):
            sequences[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return tuple(sequences)
