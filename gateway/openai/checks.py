"""The checks that the HTTP and gRPC servers share. Each raises InvalidRequest or UnknownModel with the field's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.gateway.fleet.drafter_choice import AUTO_ORDER
from outrider.gateway.request.served import RequestLimits, ServedModel
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.request.types import METHOD_AUTO, METHOD_OFF
from outrider.shared.errors import InvalidRequest, PromptTooLong, UnknownModel
from outrider.shared.request_params import Speculation


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises UnknownModel if another model is named; None means the served model."""
    if name is not None and name != model.name:
        raise UnknownModel(f"model {name[:200]!r} is not served; the served model is {model.name!r}", param="model")


def check_token_ids(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < model.vocab_size:
            raise InvalidRequest(
                f"{param}: token id {token_id} is out of vocabulary [0, {model.vocab_size})", param=param
            )


def check_prompt(token_ids: Sequence[int], model: ServedModel, param: str) -> None:
    """Checks for at least one token, all of them in the vocabulary, and room for one more in the context.

    Raises InvalidRequest or PromptTooLong.
    """
    if not token_ids:
        raise InvalidRequest(f"{param} is empty: it has no tokens", param=param)
    check_token_ids(token_ids, model, param)
    if len(token_ids) + 1 > model.max_model_len:
        raise PromptTooLong(
            f"{param} has {len(token_ids)} tokens; with one output token that exceeds the model's context of "
            f"{model.max_model_len} tokens",
            param=param,
            num_tokens=len(token_ids),
        )


def check_prompt_chars(text: str, tokenizer: Tokenizer, model: ServedModel, param: str) -> None:
    """Refuses a text that is too long for any tokenization; tokenizing megabytes would take seconds."""
    most_chars = tokenizer.most_chars_per_token
    if most_chars is not None and len(text) > most_chars * model.max_model_len:
        raise PromptTooLong(
            f"{param} has {len(text)} characters; no token has more than {most_chars}, so that exceeds the "
            f"model's context of {model.max_model_len} tokens",
            param=param,
            num_tokens=-(-len(text) // most_chars),
        )


def predicted_tokens(text: str, tokenizer: Tokenizer, model: ServedModel) -> tuple[int, ...]:
    """Returns the tokens of the predicted output, cut to the context's length."""
    check_prompt_chars(text, tokenizer, model, "prediction")
    return tuple(tokenizer.encode(text, add_special_tokens=False)[: model.max_model_len]) if text else ()


def truncate_prompt(
    token_ids: list[int], limit: int | None, side: str, num_output_tokens: int, model: ServedModel
) -> list[int]:
    """Keeps `limit` tokens, for side "left" the last ones; -1 keeps what the context allows beyond the output."""
    if side not in ("left", "right"):
        raise InvalidRequest('truncation_side must be "left" or "right"', param="truncation_side")
    if limit is None:
        return token_ids
    if limit == -1:
        limit = max(1, model.max_model_len - num_output_tokens)
    if not 1 <= limit <= model.max_model_len:
        raise InvalidRequest(
            f"truncate_prompt_tokens must be -1 or between 1 and {model.max_model_len}, got {limit}",
            param="truncate_prompt_tokens",
        )
    return token_ids[-limit:] if side == "left" else token_ids[:limit]


def output_budget(requested: int | None, default: int | None, prompt_len: int, model: ServedModel, param: str) -> int:
    """Returns the requested value if it fits, else the default limited to the context, else all of the context.

    No max_tokens exceeds the server's limit (--override-generation-config).
    """
    room = model.max_model_len - prompt_len
    limit = model.sampling_defaults.max_tokens_limit
    if requested is None:
        return min(bound for bound in (default, limit, room) if bound is not None)
    if requested < 1:
        raise InvalidRequest(f"{param} must be at least 1, got {requested}", param=param)
    if requested > room:
        raise InvalidRequest(
            f"{param} is {requested}, but the prompt's {prompt_len} tokens leave room for {room} in the model's "
            f"context of {model.max_model_len} tokens",
            param=param,
        )
    return requested if limit is None else min(requested, limit)


def check_stop(stop: Sequence[str], limits: RequestLimits, param: str = "stop") -> None:
    if len(stop) > limits.max_stop_strings:
        raise InvalidRequest(f"{param} has {len(stop)} strings, the maximum is {limits.max_stop_strings}", param=param)
    for text in stop:
        if not text:
            raise InvalidRequest(f"{param} must not contain an empty string", param=param)
        if len(text) > limits.max_stop_chars:
            raise InvalidRequest(
                f"{param} has a string of {len(text)} characters, the maximum is {limits.max_stop_chars}", param=param
            )


def check_grammar(text: str, model: ServedModel, limits: RequestLimits, param: str) -> None:
    """Checks size and support; the engine checks whether the grammar is valid."""
    if not model.supports_grammars:
        raise InvalidRequest(f"{param} is not supported by the served model", param=param)
    if len(text) > limits.max_grammar_chars:
        raise InvalidRequest(
            f"{param} has {len(text)} characters, the maximum is {limits.max_grammar_chars}", param=param
        )


def check_speculation(asked: Speculation, model: ServedModel) -> Speculation:
    """Returns the options with a method, `auto` if none is named. Raises InvalidRequest for one that is not served."""
    # The methods of a member that has not been seen are unknown; a request is decoded without drafts until then.
    knows_all = model.draft_methods and not model.has_unseen_members
    choices = (METHOD_AUTO, METHOD_OFF, *(model.draft_methods if knows_all else AUTO_ORDER))
    method = asked.method or METHOD_AUTO
    if method not in choices:
        raise InvalidRequest(
            f"speculation.method {method[:80]!r} is not one of {', '.join(choices)}", param="speculation.method"
        )
    return replace(asked, method=method)
