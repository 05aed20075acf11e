"""Arguments as models write them: what comes out is strict JSON in every family, however the output is cut and ends."""

from __future__ import annotations

import json
import os
import random
import time
from typing import Any, NoReturn
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_output_parser import mutated, parse, random_pieces, symbols_of
from tool_families import FAMILIES, OF_FAMILIES, Family
from tool_forms import MINIMAX, PROPERTIES, WEATHER
from tool_transcripts import TRANSCRIPTS, Transcript

from outrider.gateway.tool_calls.events import Folded
from outrider.gateway.tool_calls.formats import CALLS, Body
from outrider.gateway.tool_calls.lenient_json import repaired
from outrider.gateway.tool_calls.messages import template_messages

# inputs of a storm; OUTRIDER_FUZZ_INPUTS=100000 for a night's
NUM_FUZZED = int(os.environ.get("OUTRIDER_FUZZ_INPUTS", "20000"))
# Forms in which an output means nothing but a call, whatever its name.
ONLY_CALLS = (Body.NAMED, Body.TAGGED, Body.NESTED, Body.GEMMA)


def strict(text: str) -> Any:
    """As a client reads it that takes no more than RFC 8259."""

    def refuse(word: str) -> NoReturn:
        raise ValueError(f"{word} is not JSON")

    value = json.loads(text, parse_constant=refuse)
    json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    return value


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"code": "a\n\tb\x00"}', {"code": "a\n\tb\x00"}),
        ('{"re": "\\d+\\.\\w", "path": "C:\\u", "x": "\\x41"}', {"re": "\\d+\\.\\w", "path": "C:\\u", "x": "\\x41"}),
        ('{"a": "it\\\'s"}', {"a": "it's"}),
        ("{'a': True, 'b': None, 'c': ('x', \"y\"), 'd': 'it\\'s', 'e': '\\x41'}",
         {"a": True, "b": None, "c": ["x", "y"], "d": "it's", "e": "A"}),
        ('{"a": NaN, "b": -Infinity, "c": 1e999}', {"a": "NaN", "b": "-Infinity", "c": "1e999"}),
        ('{"a": [1, 2,], "b": {"c": 3,},}', {"a": [1, 2], "b": {"c": 3}}),
        ('{"a": 1, , "c": "x" "d": "y"}', {"a": 1, "c": "x", "d": "y"}),
        ('{"a": 1\n"b": [1, 2}', {"a": 1, "b": [1, 2]}),
        ('{"say": "he said "hi" to me", "n": 1}', {"say": 'he said "hi" to me', "n": 1}),
        ('{a: hello world, b: [x y, 0x10, 1_000, .5]}', {"a": "hello world", "b": ["x y", 16, 1000, 0.5]}),
        ('{"a": """x "quoted"\ny"""}', {"a": 'x "quoted"\ny'}),
        ('{"a": "\\ud83d", "b": "\\ud83d\\ude00", "c": "\\ude00\\ud83dx"}', {"a": "�", "b": "😀", "c": "��x"}),
        ('{"a": 007}', {"a": "007"}),
        ('{"a": ' + "9" * 5000 + "}", {"a": "9" * 5000}),
        ('{"a": {"b": ["x', {"a": {"b": ["x"]}}),
        ('{"a', {"a": None}),
    ],
)  # fmt: skip
def test_what_models_write_in_place_of_json(written: str, meant: Any) -> None:
    found = repaired(written)
    assert found is not None
    assert strict(found) == meant


@settings(max_examples=300, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
        max_leaves=8,
    ),
    st.sampled_from([None, 1, "\t"]),
    st.booleans(),
)
def test_json_stays_as_it_is(value: Any, indent: int | str | None, ensure_ascii: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
    found = repaired(text)
    assert found is not None
    assert strict(found) == value
    assert repr(value) != repr(strict(text)) or "\\ud" in text or found == text


def broken_json(source: random.Random) -> str:
    base = source.choice(
        ['{"a": 1, "b": [true, null, {"c": "d\\n\\u00e9"}], "e": -1.5e3}', "{'a': None, 'b': (1, 2)}", '["a","b"]', "f"]
    )
    for _ in range(source.randint(1, 9)):
        at = source.randrange(len(base) + 1)
        piece = "".join(source.choices("\"'{}[]():,=\\ \n\tux0d8fNaT1e9.-<|\x00", k=source.randint(0, 3)))
        base = base[:at] + piece + base[at + source.randrange(3) :]
    return base


@pytest.mark.parametrize("num_texts", [2_000, pytest.param(NUM_FUZZED, marks=pytest.mark.storm)])
def test_whatever_is_written_is_strict_json_or_none(num_texts: int) -> None:
    source, num_read = random.Random(num_texts), 0
    for _ in range(num_texts):
        text = broken_json(source)
        found = repaired(text)
        if found is not None:
            strict(found)
            num_read += 1
    assert num_read > num_texts / 2


@pytest.mark.parametrize("deep", ["[", '{"a":', "(", "[{'b': ("])
def test_deep_arguments_can_be_read_again(deep: str) -> None:
    found = repaired(deep * 50_000)
    assert found is not None
    strict(found)


@pytest.mark.parametrize("piece", ['"a": "x", ', "[", '"', "\\", "<", "(", "1, ", "{'a': ", "'", "x y "])
def test_reading_takes_time_in_proportion(piece: str) -> None:
    def seconds(num_chars: int) -> float:
        text = "{" + piece * (num_chars // len(piece))
        started = time.process_time()
        repaired(text)
        return time.process_time() - started

    seconds(1_000)
    assert min(seconds(200_000) for _ in range(2)) < 40 * max(min(seconds(20_000) for _ in range(3)), 0.001)


# ---- all families ----


def check(transcript: Transcript, text: str, whole: Folded) -> None:
    for call in whole.calls:
        strict(call.arguments)
        assert call.name in PROPERTIES or CALLS[transcript.tool_call_parser].body in ONLY_CALLS, text


@pytest.mark.parametrize("transcript", OF_FAMILIES, ids=lambda transcript: transcript.name)
def test_a_call_that_the_model_has_ended_is_whole(transcript: Transcript) -> None:
    """Wherever it stops, with every cut of its text at once: of that, test_output_parser.py has the rest."""
    text = symbols_of(transcript).spell(transcript.text)
    for end in range(len(text)):
        whole = parse(transcript, [text[:end]])
        check(transcript, text[:end], whole)
        assert parse(transcript, list(text[:end])) == whole


@pytest.mark.parametrize(
    "num_outputs", [1_500, pytest.param(NUM_FUZZED, marks=[pytest.mark.storm, pytest.mark.timeout(1_800)])]
)
def test_broken_outputs_have_strict_arguments(num_outputs: int) -> None:
    source = random.Random(num_outputs)
    for _ in range(num_outputs):
        transcript = source.choice((*TRANSCRIPTS, *OF_FAMILIES))
        text = mutated(symbols_of(transcript).spell(transcript.text), source)
        whole = parse(transcript, [text])
        check(transcript, text, whole)
        assert parse(transcript, random_pieces(text, 9, source)) == whole


@pytest.mark.parametrize("marker", ["<function_calls>", "</function_calls>"])
@pytest.mark.parametrize("before", ["f(", "f(a=", "f(a=1, ", "f(a={'b': ", "f(a=['x'", "[f(", "f(a=g("])
def test_a_marker_between_parentheses_ends_the_call(before: str, marker: str) -> None:
    """The arguments were read on and on where an end stood in place of one."""
    transcript = Transcript("", "olmo3", f"<function_calls>{before}{marker} rest")
    whole = parse(transcript, [transcript.text], tools={"f": {}})
    assert parse(transcript, list(transcript.text), tools={"f": {}}) == whole
    (call,) = whole.calls
    strict(call.arguments)


def test_what_is_too_long_for_a_second_name_is_text() -> None:
    rest = f"{'x' * 2000}(b=2)]<|tool_call_end|>"
    transcript = Transcript("", "lfm2", f"<|tool_call_start|>[f(a=1), {rest}")
    whole = parse(transcript, [transcript.text], tools={"f": {}})
    assert (len(whole.calls), whole.content) == (1, rest)
    assert parse(transcript, random_pieces(transcript.text, 9, random.Random(1)), tools={"f": {}}) == whole


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_nobodys_tool_makes_no_call(family: Family) -> None:
    """But where the output is nothing but calls, in a form that is nothing else."""
    calls = [("foo", {"city": "x"}), (WEATHER, {"city": "y"})]
    transcript = family.transcript("foo", calls, is_bare=True)
    text = symbols_of(transcript).spell(transcript.text)
    whole, behind_text = parse(transcript, [text]), parse(transcript, [f"As in {text}"])
    names = [call.name for call in whole.calls]
    if CALLS[family.name].body in ONLY_CALLS:
        assert names == ["foo", WEATHER]
        assert strict(whole.calls[0].arguments) == {"city": "x"}
    else:
        assert names in ([], [WEATHER])
        assert "foo" in whole.content or family.name == "openai"
    assert [call.name for call in behind_text.calls] in ([], [WEATHER])
    assert "foo" in behind_text.content or family.name == "openai"
    assert parse(transcript, list(text)) == whole
    assert parse(transcript, list(f"As in {text}")) == behind_text
    assert not parse(transcript, [text], tools={}).calls


def written(parser: str, text: str, schema: dict[str, Any] | None = None) -> Any:
    """The one call's arguments, the same with every cut in two."""
    transcript, tools = Transcript("", parser, text), {"f": {"a": schema} if schema else {}}
    whole = parse(transcript, [text], tools=tools)
    for at in range(1, len(text), 1 + len(text) // 200):
        assert parse(transcript, [text[:at], text[at:]], tools=tools) == whole
    (call,) = whole.calls
    return strict(call.arguments)


def qwen(value: str) -> str:
    return f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"


LONG = "ab " * 2_000
TAGS = {"k": "</parameter> </function>"}
STRING, NUMBER, LIST = {"type": "string"}, {"type": "number"}, {"type": "array"}


@pytest.mark.parametrize(
    ("parser", "text", "schema", "meant"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": "' + LONG + '"}, "name": "f"}</tool_call>', None, LONG),
        ("hermes", "<tool_call>{'name': 'f', 'arguments': {'a': True}}</tool_call>", None, True),
        ("granite", '<tool_call>[{"name": "f", "arguments": {"a": 1}}]', None, 1),
        ("qwen3_coder", qwen("NaN"), NUMBER, "NaN"),
        ("qwen3_coder", qwen("['x', 'y']"), LIST, ["x", "y"]),
        ("qwen3_coder", qwen('return "</parameter>" + x'), STRING, 'return "</parameter>" + x'),
        ("qwen3_coder", qwen("a\n</function>\nb"), STRING, "a\n</function>\nb"),
        ("qwen3_coder", qwen("x").replace("\n</parameter>", ""), STRING, "x"),
        ("qwen3_coder", qwen("x").partition("\n</parameter>")[0], STRING, "x"),
        ("qwen3_coder", qwen(json.dumps(TAGS)), {"type": "object"}, TAGS),
        ("glm45", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</tool_call>", STRING, "x"),
        ("gemma4", "<|tool_call>call:f{a:['x', 'y']}<tool_call|>", None, ["x", "y"]),
        ("gemma4", "<|tool_call>call:f{a:some words}<tool_call|>", None, "some words"),
        ("lfm2", "<|tool_call_start|>[f(a='it's')]<|tool_call_end|>", None, "it's"),
        ("olmo3", '<function_calls>f("x")</function_calls>', STRING, "x"),
        ("olmo3", "<function_calls>f(a=date(2020, 1, 2))</function_calls>", STRING, "date(2020, 1, 2)"),
        ("olmo3", "<function_calls>f(a=r'\\d')</function_calls>", STRING, "\\d"),
        ("openai", "<|channel|>commentary to=functions.f<|message|>{'a': 1,}<|call|>", None, 1),
    ],
)  # fmt: skip
def test_forms_of_one_argument(parser: str, text: str, schema: dict[str, Any] | None, meant: Any) -> None:
    assert written(parser, text, schema) == {"a": meant}


M = MINIMAX
INTEGER, OBJECT, LISTS = (
    {"type": "integer"},
    {"type": "object"},
    {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
)
PLACE = {"type": "object", "properties": {"city": STRING, "zip": INTEGER}}


def nested(inner: str) -> str:
    """`inner` with ~ for the mark in front of each tag."""
    return f'~<tool_call>~<invoke name="f">{inner}~</invoke>~</tool_call>'.replace("~", M)


@pytest.mark.parametrize(
    ("inner", "schema", "meant"),
    [
        ("~<a>~<city>Ulm~</city>~<zip>89073~</zip>~</a>", PLACE, {"city": "Ulm", "zip": 89073}),
        ("~<a>\n  ~<item>~<city>1~</city>~</item>\n~<item>~<zip>2~</zip>~</item>~</a>",
         LIST | {"items": PLACE}, [{"city": "1"}, {"zip": 2}]),
        ("~<a>~<item>~<item>1~</item>~</item>~<item>~</item>~</a>", LISTS, [[1], []]),
        ("~<a>~<tag>x~</tag>~<tag>7~</tag>~</a>", OBJECT, {"tag": ["x", 7]}),
        ("~<a>x~</a>\n~<a>y~</a>", STRING, ["x", "y"]),
        ("~<a>~</a>", OBJECT, {}),
        ("~<a>~</a>", LIST, []),
        ("~<a>~</a>", STRING, ""),
        ("~<a>\n x <b>y</b> \n~</a>", STRING, "\n x <b>y</b> \n"),
        ('~<a>[1, {"b": "c"}]~</a>', LIST, [1, {"b": "c"}]),
        ("~<a>~<source>web~</source>~</a>", OBJECT | {"additionalProperties": STRING}, {"source": "web"}),
        ("~<a>so: ~<b>1~</b>~</a>", OBJECT, {"b": 1, "$text": "so:"}),
        ("~<a>~<b>1~</c>~</b>~</a>", OBJECT | {"properties": {"b": STRING}}, {"b": f"1{M}</c>"}),
        ("~<a>~<b>1", OBJECT, {"b": 1}),
        ("~<a>" + "~<b>" * 150, None, mock.ANY),
    ],
)  # fmt: skip
def test_elements_within_elements(inner: str, schema: dict[str, Any] | None, meant: Any) -> None:
    assert written("minimax_m3", nested(inner), schema) == {"a": meant}


def test_time_of_elements_is_that_of_their_text() -> None:
    """Opened and never closed, closed and never opened, and the beginning of the mark alone."""
    for piece in (f"{M}<b>", f"{M}</b>", M, "]<]mini", f"{M}<b>x{M}</b>"):
        text = nested("~<a>" + piece * (60_000 // len(piece)))
        started = time.process_time()
        (call,) = parse(Transcript("", "minimax_m3", text), [text], tools={"f": {}}).calls
        strict(call.arguments)
        assert time.process_time() - started < 5, piece


@pytest.mark.parametrize("value", ["\nx\n", "x", "", '{"a": 1}', "</parameter", "\n\n"])
def test_values_of_mimo_keep_their_newlines(value: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=a>{value}</parameter>\n</function>\n</tool_call>"
    assert written("mimo", text, STRING) == {"a": value}


def test_types_that_kimi_k3_names_win_over_the_schema() -> None:
    values = {"string": "12", "number": "12", "object": '{"b": "<|sep|>"}', "null": "null"}
    meant = {"string": "12", "number": 12, "object": {"b": "<|sep|>"}, "null": None}
    for kind, value in values.items():
        argument = f'<|open|>argument key="a" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        text = f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{argument}<|close|>call<|sep|>'
        assert written("kimi_k3", f"{text}<|close|>tools<|sep|>", STRING) == {"a": meant[kind]}


def test_a_missing_end_before_the_next_argument() -> None:
    text = "<tool_call><function=f><parameter=a>\nx\n<parameter=b>\n<parameter=c>\n</parameter></function></tool_call>"
    transcript = Transcript("", "qwen3_coder", text)
    whole = parse(transcript, [text], tools={"f": {"a": STRING, "b": STRING}})
    assert strict(whole.calls[0].arguments) == {"a": "x", "b": "<parameter=c>"}


def test_a_history_keeps_what_was_written() -> None:
    function = {"name": "f", "arguments": '{"code": "left\nright", "half": "\\ud83d"}'}
    messages = [
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    ]
    (message,) = template_messages(messages, "")
    assert message["tool_calls"][0]["function"]["arguments"] == {"code": "left\nright", "half": "�"}
    function["arguments"] = "not JSON {"
    (message,) = template_messages(messages, "")
    assert message["tool_calls"][0]["function"]["arguments"] == {}


def test_developer_messages_are_joined_in_linear_time() -> None:
    text = "x" * 200
    messages = [{"role": "system", "content": "first"}, *[{"role": "developer", "content": text}] * 20_000]
    started = time.process_time()
    message, last = template_messages([*messages, {"role": "user", "content": "hi"}], "")
    assert time.process_time() - started < 1
    assert message == {"role": "system", "content": "\n\n".join(["first", *[text] * 20_000])}
    assert last == {"role": "user", "content": "hi"}
