"""Finds the rows of formats.py that a checkpoint needs, from its chat template and its special tokens.

A row is taken only where the template writes its markers: a wrong row would take text for markup.
"""

from __future__ import annotations

from collections.abc import Container

from outrider.gateway.tool_calls.formats import NONE

# (parser, texts that the template must all have); the first match wins.
_CALLS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|tool_call>",)),
    ("functiongemma", ("<start_function_call>",)),
    ("kimi_k2", ("<|tool_calls_section_begin|>",)),
    ("minimax_m2", ("<minimax:tool_call>",)),
    (NONE, ("]<]minimax[>[",)),  # MiniMax-M3's calls nest elements, which no row reads; hermes' markers are in them
    ("dots", ("<dots_function_call>",)),
    ("deepseek_v32", ("｜DSML｜", "function_calls")),
    ("deepseek_v4", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁sep｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁sep｜>",)),
    ("lfm2", ("<|tool_call_start|>",)),
    ("hy_v3", ("<tool_sep>", "<arg_key>")),
    ("glm45", ("<arg_key>",)),
    ("seed_oss", ("<seed:tool_call>",)),
    ("qwen3_coder", ("<function=", "<parameter=")),
    ("longcat", ("<longcat_tool_call>",)),
    ("internlm", ("<|action_start|>",)),
    ("mistral", ("[TOOL_CALLS]",)),
    ("cohere_command3", ("<|START_ACTION|>",)),
    ("llama4_pythonic", ("<|python_start|>",)),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ('"parameters"', "ipython")),
    ("jamba", ("<tool_calls>",)),
    ("olmo3", ("<function_calls>",)),
    ("ernie45", ("<tool_call>", "<response>")),
    ("hermes", ("<tool_call>",)),
    ("granite", ("<|tool_call|>",)),
    ("phi4_mini_json", ("functools",)),
)
_REASONING: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("openai_gptoss", ("<|channel|>", "<|message|>")),
    ("gemma4", ("<|channel>",)),
    ("mistral", ("[THINK]",)),
    ("seed_oss", ("<seed:think>",)),
    ("minimax_m3", ("<mm:think>",)),
    ("cohere_command3", ("<|START_THINKING|>",)),
    ("qwen3", ("</think>",)),
)


def recognise_tool_call_parser(template: str | None, special_tokens: Container[str]) -> str:
    """Returns the parser's name, or "none"."""
    if template is None or "tools" not in template:
        return NONE
    name = _first(_CALLS, template)
    return "mistral_json" if name == "mistral" and "[ARGS]" not in special_tokens else name


def recognise_reasoning_parser(template: str | None) -> str:
    return NONE if template is None else _first(_REASONING, template)


def _first(rows: tuple[tuple[str, tuple[str, ...]], ...], template: str) -> str:
    return next((name for name, texts in rows if all(text in template for text in texts)), NONE)
