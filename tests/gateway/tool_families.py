"""One call, several, and all that stands around calls, as every family writes it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tool_forms import (
    DEEPSEEK,
    HARMONY,
    KIMI,
    SUM,
    ZURICH,
    args_json,
    as_object,
    coder,
    deepseek_v3,
    deepseek_v31,
    dsml_section,
    glm,
    hy,
    kimi,
    minimax,
)
from tool_transcripts import Transcript

Call = tuple[str, Any]
REASONING, BEFORE, AFTER = "Two <b>calls</b>?\n\nYes.", "Let me see.", "That is  all. "
THINK = ("<think>\n", "\n</think>\n\n")


@dataclass(frozen=True)
class Family:
    """written: some calls as one turn has them. thought: around reasoning. model_ids: how its calls name themselves."""

    name: str
    written: Callable[[Sequence[Call]], str]
    special: tuple[str, ...] = ()
    reasoning_parser: str = "qwen3"
    thought: tuple[str, str] = THINK
    before: str = f"{BEFORE}\n"
    after: str = f"\n{AFTER}"
    model_ids: tuple[str, str] = ("", "")

    def transcript(self, name: str, calls: Sequence[Call], *, is_bare: bool = False) -> Transcript:
        """is_bare: nothing but the calls."""
        text = self.written(calls)
        if not is_bare:
            text = f"{self.thought[0]}{REASONING}{self.thought[1]}{self.before}{text}{self.after}"
        return Transcript(
            f"{self.name}, {name}",
            self.name,
            text,
            tuple(calls),
            "" if is_bare else BEFORE + AFTER,
            "" if is_bare else REASONING,
            self.reasoning_parser,
            self.special,
            model_ids=self.model_ids[: len(calls)] if self.model_ids[0] else (),
        )


def each(form: Callable[[Call], str], around: tuple[str, str] = ("", ""), between: str = "\n") -> Callable[..., str]:
    return lambda calls: around[0] + between.join(map(form, calls)) + around[1]


def objects(begin: str, end: str, arguments: str = "arguments") -> Callable[..., str]:
    return each(lambda call: f"{begin}{as_object(call, arguments=arguments)}{end}")


def listed(begin: str, end: str = "") -> Callable[..., str]:
    return each(as_object, (f"{begin}[", f"]{end}"), ", ")


def python(call: Call) -> str:
    return f"{call[0]}({', '.join(f'{key}={value!r}' for key, value in call[1].items())})"


def gemma(begin: str, quote: str, end: str) -> Callable[[Call], str]:
    def form(call: Call) -> str:
        values = {
            key: f"{quote}{value}{quote}" if isinstance(value, str) else json.dumps(value)
            for key, value in call[1].items()
        }
        arguments = ",".join(f"{key}:{value}" for key, value in values.items())
        return f"{begin}call:{call[0]}{{{arguments}}}{end}"

    return form


def command(calls: Sequence[Call]) -> str:
    entries = [
        f'{{"tool_call_id": "{place}", "tool_name": "{call[0]}", "parameters": {args_json(call)}}}'
        for place, call in enumerate(calls)
    ]
    return "<|START_ACTION|>[\n    " + ",\n    ".join(entries) + "\n]<|END_ACTION|>"


def harmony(call: Call) -> str:
    header = f"<|channel|>commentary to=functions.{call[0]} <|constrain|>json<|message|>"
    return f"<|start|>assistant{header}{args_json(call)}<|call|>"


SPECIAL_THINK = ("<think>", "</think>")
KIMI_SECTION = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
DEEPSEEK_SECTION = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
COMMAND = tuple(f"<|{end}_{what}|>" for what in ("THINKING", "ACTION", "RESPONSE") for end in ("START", "END"))
HY = ("<tool_calls>", "</tool_calls>", "<tool_call>", "</tool_call>", "<tool_sep>", "<arg_key>", "</arg_key>")
GEMMA = ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = ("<start_function_call>", "<end_function_call>", "<escape>")

FAMILIES = (
    Family("hermes", objects("<tool_call>\n", "\n</tool_call>"), ("<tool_call>", "</tool_call>", *SPECIAL_THINK)),
    Family("longcat", objects("<longcat_tool_call>", "</longcat_tool_call>"), ("<longcat_tool_call>",)),
    Family(
        "ernie45",
        objects("<tool_call>\n", "\n</tool_call>"),
        ("<response>", "</response>", *SPECIAL_THINK),
        before=f"<response>\n{BEFORE}\n</response>\n",
    ),
    Family("internlm", objects("<|action_start|><|plugin|>\n", "<|action_end|>", "parameters"), ("<|action_start|>",)),
    Family(
        "llama3_json",
        each(lambda call: as_object(call, arguments="parameters"), ("<|python_tag|>", ""), "; "),
        ("<|python_tag|>",),
    ),
    Family("granite", listed("<|tool_call|>"), ("<|tool_call|>",)),
    Family("phi4_mini_json", listed("functools")),
    Family("jamba", listed("<tool_calls>", "</tool_calls>"), ("<tool_calls>", "</tool_calls>")),
    Family("hunyuan_a13b", listed("<tool_calls>", "</tool_calls>"), SPECIAL_THINK),
    Family("mistral_json", listed("[TOOL_CALLS] "), ("[TOOL_CALLS]",)),
    Family(
        "cohere_command3",
        command,
        COMMAND,
        "cohere_command3",
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        before=f"<|START_RESPONSE|>{BEFORE}<|END_RESPONSE|>",
        model_ids=("0", "1"),
    ),
    Family(
        "mistral",
        each(lambda call: f"[TOOL_CALLS]{call[0]}[ARGS]{args_json(call)}", between=""),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        "mistral",
        ("[THINK]", "[/THINK]"),
    ),
    Family("deepseek_v3", each(deepseek_v3, DEEPSEEK_SECTION), (*DEEPSEEK, *SPECIAL_THINK)),
    Family("deepseek_v31", each(deepseek_v31, DEEPSEEK_SECTION, ""), (*DEEPSEEK, *SPECIAL_THINK)),
    Family("deepseek_v32", lambda calls: dsml_section(*calls, section="function_calls"), ("｜DSML｜", *SPECIAL_THINK)),
    Family("deepseek_v4", lambda calls: dsml_section(*calls, section="tool_calls"), ("｜DSML｜", *SPECIAL_THINK)),
    Family(
        "kimi_k2",
        lambda calls: (
            KIMI_SECTION[0] + "".join(kimi(call, place) for place, call in enumerate(calls)) + KIMI_SECTION[1]
        ),
        (*KIMI, *SPECIAL_THINK),
        model_ids=("functions.get_weather:0", "functions.add:1"),
    ),
    Family(
        "qwen3_coder",
        each(lambda call: f"<tool_call>\n{coder(call)}\n</tool_call>"),
        ("<tool_call>", "</tool_call>", *SPECIAL_THINK),
    ),
    Family(
        "seed_oss",
        each(lambda call: f"<seed:tool_call>\n{coder(call)}\n</seed:tool_call>"),
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
        "seed_oss",
        ("<seed:think>", "</seed:think>"),
    ),
    Family(
        "minimax_m2",
        each(minimax, ("<minimax:tool_call>\n", "\n</minimax:tool_call>")),
        ("<minimax:tool_call>", "</minimax:tool_call>", *SPECIAL_THINK),
    ),
    Family(
        "dots",
        each(minimax, ("<dots_function_call>\n", "\n</dots_function_call>")),
        ("<dots_function_call>", "</dots_function_call>", *SPECIAL_THINK),
    ),
    Family(
        "hy_v3",
        each(hy, ("<tool_calls>\n", "\n</tool_calls>")),
        (*HY, *SPECIAL_THINK),
        "hy_v3",
    ),
    Family("glm45", each(glm), ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", *SPECIAL_THINK)),
    Family(
        "pythonic",
        each(python, ("<|python_start|>[", "]<|python_end|>"), ", "),
        ("<|python_start|>", "<|python_end|>"),
    ),
    Family(
        "lfm2",
        each(python, ("<|tool_call_start|>[", "]<|tool_call_end|>"), ", "),
        ("<|tool_call_start|>", "<|tool_call_end|>", *SPECIAL_THINK),
    ),
    Family("olmo3", each(python, ("<function_calls>", "</function_calls>")), SPECIAL_THINK),
    Family(
        "gemma4",
        each(gemma("<|tool_call>", '<|"|>', "<tool_call|>"), between=""),
        GEMMA,
        "gemma4",
        ("<|channel>thought\n", "\n<channel|>"),
    ),
    Family(
        "functiongemma",
        each(gemma("<start_function_call>", "<escape>", "<end_function_call>"), between=""),
        FUNCTION_GEMMA,
    ),
    Family(
        "openai",
        each(harmony, between=""),
        HARMONY,
        "openai_gptoss",
        ("<|channel|>analysis<|message|>", "<|end|>"),
        before=f"<|start|>assistant<|channel|>commentary<|message|>{BEFORE}<|end|>",
        after=f"<|start|>assistant<|channel|>final<|message|>{AFTER}",
    ),
)
ONE = tuple(family.transcript("one call", [ZURICH], is_bare=True) for family in FAMILIES)
SEVERAL = tuple(family.transcript("several calls", [ZURICH, SUM], is_bare=True) for family in FAMILIES)
EVERYTHING = tuple(family.transcript("all at once", [ZURICH, SUM]) for family in FAMILIES)
OF_FAMILIES = (*ONE, *SEVERAL, *EVERYTHING)
