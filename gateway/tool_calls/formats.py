"""The formats in which model families write reasoning and tool calls: one row per family, under vLLM's parser names.

The formats are those of the checkpoints' chat templates. Not here: which row a checkpoint needs (recognise.py), reading
an output by a row (parser.py, *_calls.py), and forcing a model to write by it (grammar.py).
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

from outrider.shared.errors import ConfigError

Spell = Callable[[str], str]
RowT = TypeVar("RowT")


@dataclass(frozen=True)
class ReasoningFormat:
    """after: what stands between the end and the answer. answer_begin: what every answer begins with."""

    begin: str
    end: str
    after: str = ""
    answer_begin: str = ""

    def spelled(self, spell: Spell) -> ReasoningFormat:
        """The row with `spell` applied to each of its markers."""
        return replace(self, begin=spell(self.begin), end=spell(self.end))


class Body(enum.Enum):
    """The form of what follows a call's begin marker."""

    OBJECT = "object"  # {"name": "f", "arguments": {...}}
    ARRAY = "array"  # a list of such objects, or a single one
    NAMED = "named"  # the name, a separator, the arguments as JSON
    TAGGED = "tagged"  # the name, then each argument in tags of its own
    NESTED = "nested"  # likewise, in elements of the argument's name, which hold further ones
    PYTHONIC = "pythonic"  # f(a=1, b="x"), one or a list of them
    GEMMA = "gemma"  # call:f{a:1,b:<|"|>x<|"|>}
    HARMONY = "harmony"  # messages with a channel and a recipient each


@dataclass(frozen=True)
class CallFormat:
    """begin: in front of each call, or of each list of calls. also_begin: what some write in its place. end: after it.
    section: around all calls, or around each (section_each). framing: other markers that are no text. bare: the whole
    output may be a call without its marker. unmarked: how such an output begins where the template asks for the marker
    and small models leave it out; a space stands for any whitespace.

    NAMED and TAGGED: head comes before the name, separator after it. TAGGED: key_begin, the key, one of key_ends (true:
    the value is a string, false: it is JSON, None: the tool's schema says), value_begin, the value, value_end.
    is_verbatim: a newline next to a value is part of it. number_end: behind the separator stand the call's number and
    this. NESTED: value_end is followed by the key and the first of key_ends.
    """

    body: Body
    begin: str
    end: str = ""
    also_begin: tuple[str, ...] = ()
    section: tuple[str, str] = ("", "")
    section_each: bool = False
    framing: tuple[str, ...] = ()
    bare: bool = False
    unmarked: str = ""
    name_key: str = "name"
    arguments_key: str = "arguments"
    id_key: str = ""
    head: str = ""
    separator: str = ""
    id_separator: str = ""
    numbered_names: bool = False  # the name is written functions.NAME:INDEX, which is also the call's id
    key_begin: str = ""
    key_ends: tuple[tuple[str, bool | None], ...] = ()
    value_begin: str = ""
    value_end: str = ""
    is_verbatim: bool = False
    number_end: str = ""

    def around(self) -> tuple[str, ...]:
        """Returns the markers that are passed over wherever they stand between calls."""
        return tuple(marker for marker in (*self.section, *self.framing) if marker)

    def markers(self) -> tuple[str, ...]:
        """Returns every text of the row that may be, or hold, a special token."""
        texts = (self.begin, self.end, *self.also_begin, *self.around(), self.head, self.separator, self.id_separator)
        texts = (*texts, self.number_end)
        tags = (self.key_begin, *(text for text, _ in self.key_ends), self.value_begin, self.value_end)
        return tuple(text for text in (*texts, *tags) if text)

    def spelled(self, spell: Spell) -> CallFormat:
        """The row with `spell` applied to each of its markers."""
        return replace(
            self,
            begin=spell(self.begin),
            end=spell(self.end),
            also_begin=tuple(map(spell, self.also_begin)),
            section=(spell(self.section[0]), spell(self.section[1])),
            framing=tuple(map(spell, self.framing)),
            head=spell(self.head),
            separator=spell(self.separator),
            id_separator=spell(self.id_separator),
            key_begin=spell(self.key_begin),
            key_ends=tuple((spell(text), is_string) for text, is_string in self.key_ends),
            value_begin=spell(self.value_begin),
            value_end=spell(self.value_end),
            number_end=spell(self.number_end),
        )


REASONING: dict[str, ReasoningFormat] = {
    "deepseek_r1": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningFormat("<seed:think>", "</seed:think>"),
    "minimax_m3": ReasoningFormat("<mm:think>", "</mm:think>"),
    "gemma4": ReasoningFormat("<|channel>thought", "<channel|>"),
    "cohere_command3": ReasoningFormat("<|START_THINKING|>", "<|END_THINKING|>"),
    "kimi_k3": ReasoningFormat("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    "openai_gptoss": ReasoningFormat(
        "<|channel|>analysis<|message|>", "<|end|>", "<|start|>assistant", "<|channel|>final<|message|>"
    ),
}
# Other names of vLLM for the same markers.
for _name in (
    *("deepseek_v3", "deepseek_v4", "qwen3", "glm45", "minimax_m2", "kimi_k2", "step3", "step3p5", "ernie45", "olmo3"),
    *("nemotron_v3", "hy_v3", "ling3", "mimo", "poolside_v1"),
):
    REASONING[_name] = REASONING["deepseek_r1"]

_ARGUMENT_TAG = (("</arg_key>", None),)
_DSML = "｜DSML｜"
_MINIMAX = "]<]minimax[>["
_XTML_TYPES = ("number", "integer", "boolean", "null", "object", "array")

CALLS: dict[str, CallFormat] = {
    # Qwen2.5-Coder 0.5B writes its calls without markers.
    "hermes": CallFormat(Body.OBJECT, "<tool_call>", "</tool_call>", unmarked='{ "name" : "'),
    "longcat": CallFormat(Body.OBJECT, "<longcat_tool_call>", "</longcat_tool_call>"),
    "ernie45": CallFormat(Body.OBJECT, "<tool_call>", "</tool_call>", framing=("<response>", "</response>")),
    "internlm": CallFormat(Body.OBJECT, "<|action_start|><|plugin|>", "<|action_end|>", arguments_key="parameters"),
    "llama3_json": CallFormat(Body.OBJECT, "<|python_tag|>", bare=True, arguments_key="parameters"),
    # Granite 3.1 writes the marker of its earlier versions as text.
    "granite": CallFormat(Body.ARRAY, "<|tool_call|>", also_begin=("<tool_call>",)),
    "phi4_mini_json": CallFormat(Body.ARRAY, "functools"),
    "jamba": CallFormat(Body.ARRAY, "<tool_calls>", "</tool_calls>"),
    "hunyuan_a13b": CallFormat(Body.ARRAY, "<tool_calls>", "</tool_calls>"),
    "mistral_json": CallFormat(Body.ARRAY, "[TOOL_CALLS]"),
    "cohere_command3": CallFormat(
        Body.ARRAY,
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        framing=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
        name_key="tool_name",
        arguments_key="parameters",
        id_key="tool_call_id",
    ),
    "mistral": CallFormat(Body.NAMED, "[TOOL_CALLS]", separator="[ARGS]", id_separator="[CALL_ID]"),
    "deepseek_v3": CallFormat(
        Body.NAMED,
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        head="function<｜tool▁sep｜>",
        separator="```json",
    ),
    "kimi_k2": CallFormat(
        Body.NAMED,
        "<|tool_call_begin|>",
        "<|tool_call_end|>",
        section=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        separator="<|tool_call_argument_begin|>",
        numbered_names=True,
    ),
    "qwen3_coder": CallFormat(
        Body.TAGGED,
        "<function=",
        "</function>",
        section=("<tool_call>", "</tool_call>"),
        section_each=True,
        separator=">",
        key_begin="<parameter=",
        key_ends=((">", None),),
        value_end="</parameter>",
    ),
    "minimax_m2": CallFormat(
        Body.TAGGED,
        '<invoke name="',
        "</invoke>",
        section=("<minimax:tool_call>", "</minimax:tool_call>"),
        separator='">',
        key_begin='<parameter name="',
        key_ends=(('">', None),),
        value_end="</parameter>",
    ),
    "minimax_m3": CallFormat(
        Body.NESTED,
        f'{_MINIMAX}<invoke name="',
        f"{_MINIMAX}</invoke>",
        section=(f"{_MINIMAX}<tool_call>", f"{_MINIMAX}</tool_call>"),
        separator='">',
        key_begin=f"{_MINIMAX}<",
        key_ends=((">", None),),
        value_end=f"{_MINIMAX}</",
    ),
    "kimi_k3": CallFormat(
        Body.TAGGED,
        '<|open|>call tool="',
        "<|close|>call<|sep|>",
        section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
        framing=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        separator='" index="',
        number_end='"<|sep|>',
        key_begin='<|open|>argument key="',
        key_ends=(
            ('" type="string"<|sep|>', True),
            *((f'" type="{name}"<|sep|>', False) for name in _XTML_TYPES),
        ),
        value_end="<|close|>argument<|sep|>",
        is_verbatim=True,
    ),
    "deepseek_v32": CallFormat(
        Body.TAGGED,
        f'<{_DSML}invoke name="',
        f"</{_DSML}invoke>",
        section=(f"<{_DSML}function_calls>", f"</{_DSML}function_calls>"),
        separator='">',
        key_begin=f'<{_DSML}parameter name="',
        key_ends=(('" string="true">', True), ('" string="false">', False)),
        value_end=f"</{_DSML}parameter>",
    ),
    "glm45": CallFormat(
        Body.TAGGED,
        "<tool_call>",
        "</tool_call>",
        key_begin="<arg_key>",
        key_ends=_ARGUMENT_TAG,
        value_begin="<arg_value>",
        value_end="</arg_value>",
    ),
    "pythonic": CallFormat(Body.PYTHONIC, "<|python_start|>", "<|python_end|>", bare=True),
    "lfm2": CallFormat(Body.PYTHONIC, "<|tool_call_start|>", "<|tool_call_end|>"),
    "olmo3": CallFormat(Body.PYTHONIC, "<function_calls>", "</function_calls>"),
    "gemma4": CallFormat(Body.GEMMA, "<|tool_call>", "<tool_call|>", head="call:", value_begin='<|"|>'),
    "functiongemma": CallFormat(
        Body.GEMMA, "<start_function_call>", "<end_function_call>", head="call:", value_begin="<escape>"
    ),
    "openai": CallFormat(
        Body.HARMONY, "<|channel|>", framing=("<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|constrain|>")
    ),
}
for _name, _same in (
    ("llama4_json", "llama3_json"),
    ("llama4_pythonic", "pythonic"),
    ("qwen3_xml", "qwen3_coder"),
    ("granite4", "hermes"),
    ("glm47", "glm45"),
    ("ling3", "glm45"),
    ("poolside_v1", "glm45"),
    ("step3p5", "qwen3_coder"),
):
    CALLS[_name] = CALLS[_same]
CALLS["deepseek_v31"] = replace(CALLS["deepseek_v3"], head="", separator="<｜tool▁sep｜>")
CALLS["seed_oss"] = replace(CALLS["qwen3_coder"], section=("<seed:tool_call>", "</seed:tool_call>"))
CALLS["mimo"] = replace(CALLS["qwen3_coder"], is_verbatim=True)
CALLS["hy_v3"] = replace(CALLS["glm45"], section=("<tool_calls>", "</tool_calls>"), separator="<tool_sep>")
CALLS["dots"] = replace(CALLS["minimax_m2"], section=("<dots_function_call>", "</dots_function_call>"))
CALLS["deepseek_v4"] = replace(CALLS["deepseek_v32"], section=(f"<{_DSML}tool_calls>", f"</{_DSML}tool_calls>"))

NONE = "none"


@dataclass(frozen=True)
class OutputFormat:
    """The formats that a checkpoint writes besides text; None: it has none, or the request does not ask for it."""

    reasoning: ReasoningFormat | None = None
    calls: CallFormat | None = None

    def markers(self) -> tuple[str, ...]:
        reasoning = (self.reasoning.begin, self.reasoning.end) if self.reasoning is not None else ()
        return (*reasoning, *(self.calls.markers() if self.calls is not None else ()))

    def spelled(self, spell: Spell) -> OutputFormat:
        reasoning = self.reasoning.spelled(spell) if self.reasoning is not None else None
        return OutputFormat(reasoning, self.calls.spelled(spell) if self.calls is not None else None)


def output_format(reasoning_parser: str, tool_call_parser: str) -> OutputFormat:
    """Returns the format with these parsers; "" and "none" leave one out. Raises ConfigError with the known names."""
    return OutputFormat(
        _row(REASONING, reasoning_parser, "--reasoning-parser"), _row(CALLS, tool_call_parser, "--tool-call-parser")
    )


def _row(rows: dict[str, RowT], name: str, setting: str) -> RowT | None:
    if name in ("", NONE):
        return None
    if name not in rows:
        raise ConfigError(f"{setting}: {name!r} is not one of {', '.join((*sorted(rows), NONE))}", param=setting)
    return rows[name]
