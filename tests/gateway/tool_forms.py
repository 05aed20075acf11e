"""How each family writes calls: the parts of transcripts, in the forms of the chat templates."""

from __future__ import annotations

import json
from typing import Any

WEATHER, ADD, NOW = "get_weather", "add", "now"
PROPERTIES: dict[str, dict[str, Any]] = {
    WEATHER: {"city": {"type": "string"}, "days": {"type": "integer"}, "metric": {"type": "boolean"}},
    ADD: {"numbers": {"type": "array"}, "note": {"type": "string"}},
    NOW: {},
}
ZURICH = (WEATHER, {"city": "Zürich", "days": 3, "metric": True})
SUM = (ADD, {"numbers": [1, 2.5, -3], "note": 'say "hi" }]</x>'})
EMPTY = (NOW, {})


def as_object(call: tuple[str, Any], name: str = "name", arguments: str = "arguments") -> str:
    return json.dumps({name: call[0], arguments: call[1]}, ensure_ascii=False)


def args_json(call: tuple[str, Any]) -> str:
    return json.dumps(call[1], ensure_ascii=False)


def tagged(call: tuple[str, Any], form: str) -> str:
    """`form` has KEY and VALUE."""
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in call[1].items()}
    return "".join(form.replace("KEY", key).replace("VALUE", value) for key, value in values.items())


def coder(call: tuple[str, Any]) -> str:
    tags = tagged(call, "<parameter=KEY>\nVALUE\n</parameter>\n")
    return f"<function={call[0]}>\n{tags}</function>"


def glm(call: tuple[str, Any]) -> str:
    tags = tagged(call, "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
    return f"<tool_call>{call[0]}\n{tags}</tool_call>"


def hy(call: tuple[str, Any]) -> str:
    tags = tagged(call, "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n")
    return f"<tool_call>{call[0]}<tool_sep>\n{tags}</tool_call>"


def minimax(call: tuple[str, Any]) -> str:
    tags = tagged(call, '<parameter name="KEY">VALUE</parameter>\n')
    return f'<invoke name="{call[0]}">\n{tags}</invoke>'


def dsml(call: tuple[str, Any]) -> str:
    rows = [
        f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
        f"{value if isinstance(value, str) else json.dumps(value)}</｜DSML｜parameter>\n"
        for key, value in call[1].items()
    ]
    return f'<｜DSML｜invoke name="{call[0]}">\n{"".join(rows)}</｜DSML｜invoke>'


def deepseek_v3(call: tuple[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{call[0]}\n```json\n{args_json(call)}\n```<｜tool▁call▁end｜>"


def deepseek_v31(call: tuple[str, Any]) -> str:
    return f"<｜tool▁call▁begin｜>{call[0]}<｜tool▁sep｜>{args_json(call)}<｜tool▁call▁end｜>"


def dsml_section(*calls: tuple[str, Any], section: str) -> str:
    written = "\n".join(map(dsml, calls))
    return f"<｜DSML｜{section}>\n{written}\n</｜DSML｜{section}>"


def kimi(call: tuple[str, Any], index: int) -> str:
    ident = f"functions.{call[0]}:{index}"
    return f"<|tool_call_begin|>{ident}<|tool_call_argument_begin|>{args_json(call)}<|tool_call_end|>"


HERMES = ("<tool_call>", "</tool_call>", "<think>", "</think>")
DEEPSEEK = tuple(f"<｜tool▁{name}｜>" for name in ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep"))
KIMI = tuple(
    f"<|tool_{name}|>"
    for name in ("calls_section_begin", "calls_section_end", "call_begin", "call_end", "call_argument_begin")
)
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|constrain|>")

# Per row of the formats, the special tokens of its family.
SPECIAL: dict[str, tuple[str, ...]] = {
    "hermes": HERMES,
    "longcat": ("<longcat_tool_call>", "</longcat_tool_call>"),
    "internlm": ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    "llama3_json": ("<|python_tag|>",),
    "granite": ("<|tool_call|>",),
    "phi4_mini_json": (),
    "jamba": ("<tool_calls>", "</tool_calls>"),
    "cohere_command3": ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "mistral_json": ("[TOOL_CALLS]",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    "deepseek_v3": DEEPSEEK,
    "deepseek_v31": DEEPSEEK,
    "deepseek_v32": ("｜DSML｜",),
    "kimi_k2": KIMI,
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "seed_oss": ("<seed:tool_call>", "</seed:tool_call>"),
    "minimax_m2": ("<minimax:tool_call>", "</minimax:tool_call>"),
    "hy_v3": ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>"),
    "glm45": HERMES,
    "llama4_pythonic": ("<|python_start|>", "<|python_end|>"),
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": (),
    "gemma4": ("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": ("<start_function_call>", "<end_function_call>", "<escape>"),
    "openai": HARMONY,
}
