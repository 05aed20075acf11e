"""What models of each family write, and what it means. Written for these tests in the forms of the chat templates."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from tool_forms import (
    ADD,
    DEEPSEEK,
    EMPTY,
    HARMONY,
    HERMES,
    KIMI,
    SUM,
    WEATHER,
    ZURICH,
    args_json,
    as_object,
    coder,
    deepseek_v3,
    deepseek_v31,
    dsml_section,
    glm,
    kimi,
    minimax,
)

OTHER_JSON = '{"name": "Bob", "arguments": {}}'


@dataclass(frozen=True)
class Transcript:
    """special: the markers that are special tokens. in_reasoning: the prompt has opened it."""

    name: str
    tool_call_parser: str
    text: str
    calls: tuple[tuple[str, Any], ...] = ()
    content: str = ""
    reasoning: str = ""
    reasoning_parser: str = "none"
    special: tuple[str, ...] = ()
    in_reasoning: bool = False
    model_ids: tuple[str, ...] = field(default=())


TRANSCRIPTS = (
    Transcript("hermes one", "hermes", f"<tool_call>\n{as_object(ZURICH)}\n</tool_call>", (ZURICH,), special=HERMES),
    Transcript(
        "hermes three with text",
        "hermes",
        f"Let me see.\n\n<tool_call>\n{as_object(ZURICH)}\n</tool_call>\n<tool_call>\n{as_object(SUM)}\n</tool_call>\n"
        f"<tool_call>\n{as_object(EMPTY)}\n</tool_call>\nThat is  all.\n",
        (ZURICH, SUM, EMPTY),
        "Let me see.That is  all.\n",
        special=HERMES,
    ),
    Transcript(
        "hermes in plain text",
        "hermes",
        f"a < b <tool_calm <tool_call>{as_object(SUM)}</tool_call>",
        (SUM,),
        "a < b <tool_calm",
    ),
    Transcript(
        "hermes thinks",
        "hermes",
        f"<think>\nI need <b>weather</b>.\n\nYes.\n</think>\n\nHere:\n<tool_call>\n{as_object(ZURICH)}\n</tool_call>",
        (ZURICH,),
        "Here:",
        "I need <b>weather</b>.\n\nYes.",
        "qwen3",
        HERMES,
    ),
    Transcript(
        "hermes thinks, opened by the prompt",
        "hermes",
        "Sum?\n</think>\n\nNo tools needed. ",
        (),
        "No tools needed. ",
        "Sum?",
        "deepseek_r1",
        HERMES,
        in_reasoning=True,
    ),
    Transcript(
        "hermes arguments first, an extra bracket",
        "hermes",
        '<tool_call>{"arguments": {"city": "x"}, "name": "get_weather"}}</tool_call>'
        '<tool_call>{"name": "now"}</tool_call>',
        ((WEATHER, {"city": "x"}), EMPTY),
        special=HERMES,
    ),
    Transcript(
        "hermes no call after its marker",
        "hermes",
        f"Use <tool_call> to call. <tool_call>{as_object(EMPTY)}</tool_call>",
        (EMPTY,),
        "Use <tool_call> to call.",
        special=HERMES,
    ),
    Transcript(
        "hermes without markers",
        "hermes",
        f"{as_object(ZURICH)}\n{json.dumps({'name': ADD, 'arguments': SUM[1]}, indent=2)}\n",
        (ZURICH, SUM),
        special=HERMES,
    ),
    Transcript(
        "hermes thinks, then calls without markers",
        "hermes",
        f"<think>\nSum?\n</think>\n\n{as_object(SUM)}</tool_call>",
        (SUM,),
        "",
        "Sum?",
        "qwen3",
        HERMES,
    ),
    Transcript(
        "hermes other JSON",
        "hermes",
        '{"name": "Bob", "arguments": {}}',
        (),
        '{"name": "Bob", "arguments": {}}',
        special=HERMES,
    ),
    Transcript(
        "hermes names a call in its text",
        "hermes",
        f"<tool_call>{as_object(EMPTY)}</tool_call>\n{as_object(SUM)}",
        (EMPTY,),
        as_object(SUM),
        special=HERMES,
    ),
    Transcript(
        "mistral list, arguments in a string",
        "mistral_json",
        '[TOOL_CALLS][{"name": "add", "arguments": "{\\"numbers\\": [1]}"}]',
        ((ADD, {"numbers": [1]}),),
        special=("[TOOL_CALLS]",),
    ),
    Transcript("hermes no arguments", "hermes", '<tool_call>{"name": "now"}</tool_call>', (EMPTY,), special=HERMES),
    Transcript(
        "longcat",
        "longcat",
        f"<longcat_tool_call>{as_object(SUM)}</longcat_tool_call>",
        (SUM,),
        special=("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    Transcript(
        "ernie",
        "ernie45",
        f"Hm.\n</think>\n\n<response>\nSo.\n</response>\n\n<tool_call>\n{as_object(SUM)}\n</tool_call>\n",
        (SUM,),
        "So.",
        "Hm.",
        "ernie45",
        ("</think>", "<response>", "</response>", "<tool_call>", "</tool_call>"),
        in_reasoning=True,
    ),
    Transcript(
        "internlm",
        "internlm",
        f"Ok<|action_start|><|plugin|>\n{as_object(SUM, arguments='parameters')}<|action_end|>\n",
        (SUM,),
        "Ok",
        special=("<|action_start|>", "<|plugin|>", "<|action_end|>"),
    ),
    Transcript("llama bare", "llama3_json", as_object(ZURICH, arguments="parameters"), (ZURICH,)),
    Transcript(
        "llama two",
        "llama3_json",
        f"<|python_tag|>{as_object(ZURICH, arguments='parameters')}; {as_object(EMPTY, arguments='parameters')}",
        (ZURICH, EMPTY),
        special=("<|python_tag|>",),
    ),
    Transcript("llama other JSON", "llama3_json", OTHER_JSON, (), OTHER_JSON),
    Transcript(
        "granite",
        "granite",
        f"<|tool_call|>[{as_object(ZURICH)}, {as_object(SUM)}]",
        (ZURICH, SUM),
        special=("<|tool_call|>",),
    ),
    Transcript("phi", "phi4_mini_json", f"functools[{as_object(ZURICH)}]", (ZURICH,)),
    Transcript(
        "jamba",
        "jamba",
        f"<tool_calls>[\n{as_object(ZURICH)},\n{as_object(EMPTY)}\n]</tool_calls>",
        (ZURICH, EMPTY),
        special=("<tool_calls>", "</tool_calls>"),
    ),
    Transcript("mistral list", "mistral", f"[TOOL_CALLS] [{as_object(ZURICH)}]", (ZURICH,), special=("[TOOL_CALLS]",)),
    Transcript(
        "mistral",
        "mistral",
        f"[THINK]Two.[/THINK]Ok[TOOL_CALLS]{ZURICH[0]}[ARGS]{args_json(ZURICH)}[TOOL_CALLS]{SUM[0]}[CALL_ID]abc123DEF[ARGS]{args_json(SUM)}",
        (ZURICH, SUM),
        "Ok",
        "Two.",
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        model_ids=("", "abc123DEF"),
    ),
    Transcript(
        "command",
        "cohere_command3",
        '<|START_THINKING|>Hm.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "now", '
        '"parameters": {}},\n    {"tool_call_id": "1", "tool_name": "add", "parameters": '
        + args_json(SUM)
        + "}\n]<|END_ACTION|>",
        (EMPTY, SUM),
        "",
        "Hm.",
        "cohere_command3",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
        model_ids=("0", "1"),
    ),
    Transcript(
        "deepseek v3",
        "deepseek_v3",
        f"Ok.<｜tool▁calls▁begin｜>{deepseek_v3(ZURICH)}\n{deepseek_v3(SUM)}<｜tool▁calls▁end｜>",
        (ZURICH, SUM),
        "Ok.",
        special=DEEPSEEK,
    ),
    Transcript(
        "deepseek v3.1",
        "deepseek_v31",
        f"Hm.</think>Ok.<｜tool▁calls▁begin｜>{deepseek_v31(ZURICH)}{deepseek_v31(EMPTY)}<｜tool▁calls▁end｜>",
        (ZURICH, EMPTY),
        "Ok.",
        "Hm.",
        "deepseek_v3",
        (*DEEPSEEK, "<think>", "</think>"),
        in_reasoning=True,
    ),
    Transcript(
        "deepseek v3.2",
        "deepseek_v32",
        "Ok.\n\n" + dsml_section(ZURICH, SUM, section="function_calls"),
        (ZURICH, SUM),
        "Ok.",
        special=("｜DSML｜",),
    ),
    Transcript(
        "deepseek v4",
        "deepseek_v4",
        "Ok.\n\n" + dsml_section(EMPTY, section="tool_calls"),
        (EMPTY,),
        "Ok.",
        special=("｜DSML｜",),
    ),
    Transcript(
        "kimi",
        "kimi_k2",
        f"Ok.<|tool_calls_section_begin|>{kimi(ZURICH, 4)}{kimi(EMPTY, 5)}<|tool_calls_section_end|>",
        (ZURICH, EMPTY),
        "Ok.",
        special=KIMI,
        model_ids=("functions.get_weather:4", "functions.now:5"),
    ),
    Transcript(
        "qwen3 coder",
        "qwen3_coder",
        f"Ok.\n\n<tool_call>\n{coder(ZURICH)}\n</tool_call>\n<tool_call>\n{coder(SUM)}\n</tool_call>\n<tool_call>\n"
        f"{coder(EMPTY)}\n</tool_call>",
        (ZURICH, SUM, EMPTY),
        "Ok.",
        special=("<tool_call>", "</tool_call>"),
    ),
    Transcript(
        "qwen3.5 calls while it thinks",
        "qwen3_coder",
        f"I call.\n\n<tool_call>\n{coder(ZURICH)}\n</tool_call>",
        (ZURICH,),
        "",
        "I call.",
        "qwen3",
        HERMES,
        in_reasoning=True,
    ),
    Transcript(
        "qwen3 coder, a closing tag inside a value",
        "qwen3_coder",
        '<tool_call>\n<function=add>\n<parameter=numbers>\n["</parameter>", 1]\n</parameter>\n</function>'
        "\n</tool_call>",
        ((ADD, {"numbers": ["</parameter>", 1]}),),
        special=HERMES,
    ),
    Transcript(
        "seed",
        "seed_oss",
        f"<seed:think>Hm.</seed:think><seed:tool_call>\n{coder(ZURICH)}\n</seed:tool_call>",
        (ZURICH,),
        "",
        "Hm.",
        "seed_oss",
        ("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    Transcript(
        "minimax",
        "minimax_m2",
        f"Hm.\n</think>\n\n<minimax:tool_call>\n{minimax(ZURICH)}\n{minimax(SUM)}\n</minimax:tool_call>",
        (ZURICH, SUM),
        "",
        "Hm.",
        "minimax_m2",
        ("</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        in_reasoning=True,
    ),
    Transcript(
        "glm",
        "glm45",
        f"<think>Hm.</think>\nOk.\n{glm(ZURICH)}\n{glm(EMPTY)}",
        (ZURICH, EMPTY),
        "Ok.",
        "Hm.",
        "glm45",
        HERMES,
    ),
    Transcript(
        "llama 4",
        "llama4_pythonic",
        '<|python_start|>[get_weather(city="Zürich", days=3, metric=True), now()]<|python_end|>',
        (ZURICH, EMPTY),
        special=("<|python_start|>", "<|python_end|>"),
    ),
    Transcript(
        "pythonic bare",
        "pythonic",
        """[add(numbers=[1, 2.5, -3], note='say "hi" }]</x>')]""",
        (SUM,),
    ),
    Transcript("pythonic a list", "pythonic", "[1, 2] and [x](y)", (), "[1, 2] and [x](y)"),
    Transcript(
        "lfm2",
        "lfm2",
        "<|tool_call_start|>[get_weather(city='Zürich', days=3, metric=true)]<|tool_call_end|>Checking.",
        (ZURICH,),
        "Checking.",
        special=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    Transcript(
        "olmo",
        "olmo3",
        '<function_calls>get_weather(city="Zürich", days=3, metric=true)\nnow()</function_calls>',
        (ZURICH, EMPTY),
    ),
    Transcript(
        "gemma",
        "gemma4",
        "<|channel>thought\nHm.\n<channel|>"
        '<|tool_call>call:add{numbers:[1,2.5,-3],note:<|"|>say "hi" }]</x><|"|>}<tool_call|>'
        "<|tool_call>call:now{}<tool_call|>",
        (SUM, EMPTY),
        "",
        "Hm.",
        "gemma4",
        ("<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>'),
    ),
    Transcript(
        "functiongemma",
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Zürich<escape>,days:3,metric:true}<end_function_call>",
        (ZURICH,),
        special=("<start_function_call>", "<end_function_call>", "<escape>"),
    ),
    Transcript(
        "harmony",
        "openai",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Ok. <|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{args_json(ZURICH)}<|call|>",
        (ZURICH,),
        "Ok. ",
        "Hm.",
        "openai_gptoss",
        HARMONY,
    ),
    Transcript(
        "harmony recipient first",
        "openai",
        f" to=functions.add<|channel|>commentary json<|message|>{args_json(SUM)}<|call|>",
        (SUM,),
        special=HARMONY,
    ),
    Transcript("harmony plain", "openai", "<|channel|>final<|message|>It is 4.", (), "It is 4.", special=HARMONY),
)
