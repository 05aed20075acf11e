"""Which parsers a checkpoint gets, by the parts of chat templates that write calls; and how marker tokens are shown."""

from __future__ import annotations

import pytest
from gateway_script import DEMO_TARGET
from small_tokenizers import wordpiece_tokenizer
from tool_forms import HERMES
from tool_tokenizers import TEMPLATE, tokenizer_of

from outrider.gateway.config import GatewayConfig
from outrider.gateway.request.detokenizer import IncrementalDetokenizer, TextEnd
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.servers.live_service import _parsers
from outrider.gateway.tool_calls.formats import CALLS, REASONING, output_format
from outrider.gateway.tool_calls.recognise import recognise_reasoning_parser, recognise_tool_call_parser
from outrider.gateway.tool_calls.symbols import Symbols
from outrider.shared.config import load_config
from outrider.shared.errors import ConfigError

CASES = [
    ("<tool_call>\n{{ call }}\n</tool_call>", "hermes"),
    ("<tool_call>\n<function={{ name }}>\n<parameter={{ key }}>", "qwen3_coder"),
    ("<tool_call>{{ name }}<arg_key>{{ key }}</arg_key>", "glm45"),
    ("<minimax:tool_call>\n<invoke name=", "minimax_m2"),
    ("{%- set ns_token = ']<]minimax[>[' %}{{ ns_token }}<tool_call>\n<invoke name=", "none"),
    ("<dots_function_call>\n<invoke name=", "dots"),
    ("<tool_calls>\n<tool_call>{{ name }}<tool_sep>\n<arg_key>{{ key }}</arg_key>", "hy_v3"),
    ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ name }}\n```json", "deepseek_v3"),
    ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
    ("<｜DSML｜function_calls>", "deepseek_v32"),
    ("<｜DSML｜tool_calls>", "deepseek_v4"),
    ("<|tool_calls_section_begin|>", "kimi_k2"),
    ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral"),
    ("<|python_tag|>{{ name }}", "llama3_json"),
    ("<|python_start|>[{{ name }}(", "llama4_pythonic"),
    ("<|tool_call_start|>[", "lfm2"),
    ("<|tool_call>call:{{ name }}{", "gemma4"),
    ("<|start|>assistant<|channel|>commentary to=functions.{{ name }}<|message|>", "openai"),
    ("<|START_ACTION|>", "cohere_command3"),
    ("{{ messages }}", "none"),
]


@pytest.mark.parametrize(("snippet", "parser"), CASES)
def test_calls_by_what_the_template_writes(snippet: str, parser: str) -> None:
    assert recognise_tool_call_parser("{% if tools %}" + snippet, {"[ARGS]"}) == parser
    assert recognise_tool_call_parser(snippet, {"[ARGS]"}) == "none"  # it takes no tools


def test_older_models_of_mistral_have_no_token_for_arguments() -> None:
    assert recognise_tool_call_parser("{{ tools }}[TOOL_CALLS] [", {"[TOOL_CALLS]"}) == "mistral_json"


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        ("{{ content.split('</think>') }}", "qwen3"),
        ("[THINK]{{ thinking }}[/THINK]", "mistral"),
        ("<mm:think>{{ thinking }}</mm:think>", "minimax_m3"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
        ("{{ messages }}", "none"),
        (None, "none"),
    ],
)
def test_reasoning_by_its_markers(template: str | None, parser: str) -> None:
    assert recognise_reasoning_parser(template) == parser


def test_settings_win_over_the_template() -> None:
    tokenizer = tokenizer_of(HERMES, TEMPLATE + "<think></think><tool_call>")

    def parsers_of(*argv: str) -> tuple[str, str]:
        return _parsers(load_config(GatewayConfig, argv, {}, prog="gateway", description=""), tokenizer)

    assert parsers_of() == ("qwen3", "hermes")
    assert parsers_of("--reasoning-parser", "none", "--tool-call-parser", "kimi_k2") == ("none", "kimi_k2")
    with pytest.raises(ConfigError, match=r"--tool-call-parser.*hermes"):
        parsers_of("--tool-call-parser", "hermse")
    with pytest.raises(ConfigError, match="'x' is not one of"):
        output_format("none", "x")


def test_the_demo_model_has_neither() -> None:
    template = Tokenizer.load(DEMO_TARGET).chat_template_source
    assert (recognise_tool_call_parser(template, ()), recognise_reasoning_parser(template)) == ("none", "none")


def test_names_are_those_of_vllm() -> None:
    assert {"hermes", "llama3_json", "qwen3_coder", "deepseek_v31", "kimi_k2", "openai"} <= CALLS.keys()
    assert {"deepseek_r1", "qwen3", "glm45", "openai_gptoss"} <= REASONING.keys()


def test_a_marker_token_is_a_symbol_between_whole_texts() -> None:
    """Also where a token's text depends on its neighbours, and where a character is still unfinished before it."""
    bytewise, words = tokenizer_of(HERMES), wordpiece_tokenizer()
    symbol = Symbols(("<think>",)).spell("<think>")
    ids = [*bytewise.encode("é", add_special_tokens=False)[:1], bytewise.control_tokens["<think>"]]
    detokenizer = IncrementalDetokenizer(bytewise, (), marker_tokens=("<think>",))
    assert detokenizer.process(ids).text == "\ufffd" + symbol
    separator = Symbols(("[SEP]",)).spell("[SEP]")
    ids = words.encode("playing", add_special_tokens=False)
    shown = IncrementalDetokenizer(words, (), marker_tokens=("[SEP]",))
    assert shown.process([*ids, 1, *ids]).text + shown.finish() == f"playing{separator} playing"


def test_a_stop_string_that_spells_a_marker_is_found_and_named_as_it_was_given() -> None:
    tokenizer = tokenizer_of(HERMES)
    ids = tokenizer.encode("a</think>b", add_special_tokens=False)
    piece = IncrementalDetokenizer(tokenizer, (), stop=("</think>",), marker_tokens=("</think>",)).process(ids)
    assert (piece.text, piece.end, piece.num_tokens_kept) == ("a", TextEnd("</think>"), 2)
