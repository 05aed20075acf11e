"""Checkpoints whose chat template or tokenizer would stop the gateway: refused at load by name, within seconds."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from outrider.gateway.request import tokenizer
from outrider.gateway.request.text_trial import try_texts
from outrider.shared.errors import ConfigError, InvalidRequest

DEMO = Path(__file__).parents[3] / "models" / "demo-target"
# seconds; a refusal on a busy machine, where the limit of CPU is 3 s
REFUSED_WITHIN_S = 45.0
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


def checkpoint(folder: Path, *, template: str = "x", rules: Tokenizer | None = None) -> str:
    shutil.copy(DEMO / "tokenizer.json", folder)
    if rules is not None:
        rules.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return str(folder)


def refused(folder: str, part: str) -> None:
    started = time.monotonic()
    with pytest.raises(ConfigError, match=f"its {part} fails on short texts"):
        try_texts(folder)
    assert time.monotonic() - started < REFUSED_WITHIN_S


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(ENDLESS, marks=pytest.mark.storm),  # all of its CPU
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{{ 'a' * 10 ** 10 }}",
        "{% set ns = namespace(s='a') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% for i in range(2000) %}{{ 'a' * 1000 }}{% endfor %}",
    ],
    ids=["loops", "macros", "product", "doubling", "long"],
)
def test_a_template_that_takes_too_much(tmp_path: Path, template: str) -> None:
    refused(checkpoint(tmp_path, template=template), "chat template")


@pytest.mark.parametrize("pattern", ["a+$", "(a+)+b"])
def test_a_pattern_that_backtracks(tmp_path: Path, pattern: str) -> None:
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    refused(checkpoint(tmp_path, rules=rules), "tokenizer")


def test_a_text_that_grows(tmp_path: Path) -> None:
    rules = Tokenizer(models.BPE())
    rules.normalizer = normalizers.Replace("a", "b" * 10_000_000)
    refused(checkpoint(tmp_path, rules=rules), "tokenizer")


@pytest.mark.parametrize("template", ["x", "{{ raise_exception('no') }}", "{% for"])
def test_what_is_no_danger_passes(tmp_path: Path, template: str) -> None:
    """A template that refuses messages is within its right; one that does not compile is refused with the reason."""
    try_texts(str(DEMO))
    try_texts(checkpoint(tmp_path, template=template))


def test_a_template_that_is_too_deep_is_the_checkpoints_fault(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, template="{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}")
    with pytest.raises(ConfigError, match="does not compile"):
        tokenizer.Tokenizer.load(folder)


def test_a_panic_of_the_tokenizer_is_an_error_of_the_request() -> None:
    rules = Tokenizer(models.BPE())
    rules.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+b"), "isolated")
    with pytest.raises(InvalidRequest, match="tokenizer fails on this text"):
        tokenizer.Tokenizer(rules, {}, None).encode("a" * 40)
