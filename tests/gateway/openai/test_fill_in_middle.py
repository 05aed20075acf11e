"""A completion's suffix: each family's prompt as its model card writes it, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tokenizers
from gateway_script import DEMO_TARGET, ScriptedService

from outrider.gateway.openai.convert import prepare_completion
from outrider.gateway.openai.schema import CompletionRequest, parse_body
from outrider.gateway.request.answers import Prepared
from outrider.gateway.request.served import Served
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import InvalidRequest

# The added tokens, and the prompt with "def f(" before the gap and "return x" behind it.
FAMILIES = {
    "Qwen2.5-Coder": (
        ("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
        "<|fim_prefix|>def f(<|fim_suffix|>return x<|fim_middle|>",
    ),
    "StarCoder2": (
        ("<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<fim_pad>"),
        "<fim_prefix>def f(<fim_suffix>return x<fim_middle>",
    ),
    "SantaCoder": (
        ("<fim-prefix>", "<fim-middle>", "<fim-suffix>", "<fim-pad>"),
        "<fim-prefix>def f(<fim-suffix>return x<fim-middle>",
    ),
    "DeepSeek-Coder-V2": (
        ("<｜fim▁hole｜>", "<｜fim▁begin｜>", "<｜fim▁end｜>"),
        "<｜fim▁begin｜>def f(<｜fim▁hole｜>return x<｜fim▁end｜>",
    ),
    "Codestral": (("[PREFIX]", "[MIDDLE]", "[SUFFIX]"), "[SUFFIX]return x[PREFIX]def f("),
}


def served_with(tokens: tuple[str, ...]) -> Served:
    backend = tokenizers.Tokenizer.from_file(str(DEMO_TARGET / "tokenizer.json"))
    backend.add_special_tokens(list(tokens))
    service = ScriptedService(Tokenizer(backend, {}, None))
    model = replace(service.model, vocab_size=service.tokenizer.vocab_size)
    return Served(model, service.tokenizer, service.limits)


def completion(served: Served, **body: Any) -> Prepared:
    return prepare_completion(parse_body(CompletionRequest, {"prompt": "def f(", **body}), served)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_prompt_is_the_familys(family: str) -> None:
    tokens, expected = FAMILIES[family]
    served = served_with(tokens)
    [request] = completion(served, suffix="return x").requests
    assert served.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False) == expected
    markers = {served.tokenizer.control_tokens[token] for token in tokens if token in expected}
    assert markers <= set(request.prompt_token_ids)


def test_every_prompt_gets_the_suffix() -> None:
    served = served_with(FAMILIES["StarCoder2"][0])
    prepared = completion(served, prompt=["a {suffix}", "b"], suffix="{prompt}", n=2)
    shown = [served.tokenizer.decode(request.prompt_token_ids, False) for request in prepared.requests]
    assert shown == [
        "<fim_prefix>a {suffix}<fim_suffix>{prompt}<fim_middle>",
        "<fim_prefix>b<fim_suffix>{prompt}<fim_middle>",
    ]


@pytest.mark.parametrize("suffix", ["", None])
def test_an_empty_suffix_is_none(tokenizer: Tokenizer, suffix: str | None) -> None:
    served = served_with(())
    [request] = completion(served, suffix=suffix).requests
    assert request.prompt_token_ids == tuple(tokenizer.encode("def f("))


@pytest.mark.parametrize(
    ("tokens", "body", "reason"),
    [
        ((), {}, "the served model's tokenizer has no tokens for filling in the middle"),
        (("<fim_prefix>", "<fim_middle>"), {}, "has no tokens for filling in the middle"),
        (FAMILIES["StarCoder2"][0], {"prompt": [5, 6]}, "needs prompts of text"),
        (FAMILIES["StarCoder2"][0], {"prompt": [[5], [6]]}, "needs prompts of text"),
        (FAMILIES["StarCoder2"][0], {"echo": True}, "cannot be combined with echo"),
        (FAMILIES["StarCoder2"][0], {"truncate_prompt_tokens": 3}, "with truncate_prompt_tokens"),
        (FAMILIES["StarCoder2"][0], {"suffix": 5}, "must be a string"),
    ],
)
def test_refusals(tokens: tuple[str, ...], body: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as raised:
        completion(served_with(tokens), **{"suffix": "x", **body})
    assert raised.value.param == "suffix"
