"""Every family's transcripts, cut anywhere, come to the same calls, text and reasoning; broken ones lose nothing."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_families import EVERYTHING, OF_FAMILIES, SEVERAL
from tool_forms import PROPERTIES
from tool_transcripts import TRANSCRIPTS, Transcript

from outrider.gateway.tool_calls.context import MAX_HELD_CHARS
from outrider.gateway.tool_calls.events import CallBegins, Folded, fold
from outrider.gateway.tool_calls.formats import CALLS, Body, output_format
from outrider.gateway.tool_calls.parser import OutputParser, Tools
from outrider.gateway.tool_calls.reader import Reader, Step
from outrider.gateway.tool_calls.symbols import Symbols, is_symbol, marker_tokens

# Whose arguments are JSON, which is passed on as it is written.
AS_WRITTEN = {name for name, row in CALLS.items() if row.body in (Body.OBJECT, Body.ARRAY, Body.NAMED, Body.HARMONY)}
WRITTEN = (*TRANSCRIPTS, *EVERYTHING)
BY_NAME = {transcript.name: transcript for transcript in TRANSCRIPTS}


def symbols_of(transcript: Transcript) -> Symbols:
    output = output_format(transcript.reasoning_parser, transcript.tool_call_parser)
    return Symbols(marker_tokens(output.markers(), transcript.special))


def parser_of(
    transcript: Transcript,
    *,
    parallel: bool,
    must_call: bool = False,
    tools: dict[str, dict[str, Any]] | None = None,
) -> OutputParser:
    return OutputParser(
        output_format(transcript.reasoning_parser, transcript.tool_call_parser),
        symbols_of(transcript),
        Tools(PROPERTIES if tools is None else tools, parallel, must_call),
        starts_in_reasoning=transcript.in_reasoning,
    )


def parse(
    transcript: Transcript,
    pieces: list[str],
    *,
    parallel: bool = True,
    must_call: bool = False,
    was_cut: bool = False,
    tools: dict[str, dict[str, Any]] | None = None,
) -> Folded:
    """`pieces` have their special tokens as symbols. tools: in place of the transcripts'."""
    parser = parser_of(transcript, parallel=parallel, must_call=must_call, tools=tools)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish(was_cut=was_cut)
    names = [event.index for event in events if isinstance(event, CallBegins)]
    assert names == sorted(set(names)), "a call begins twice"
    return fold(events)


def random_pieces(text: str, longest: int, source: random.Random) -> list[str]:
    pieces, at = [], 0
    while at < len(text):
        size = source.randint(1, longest)
        pieces.append(text[at : at + size])
        at += size
    return pieces


def same_at_every_cut(transcript: Transcript, text: str) -> Folded:
    whole = parse(transcript, [text])
    for at in range(1, len(text)):
        assert parse(transcript, [text[:at], text[at:]]) == whole, f"cut at {at}: {text[:at]!r}"
    assert parse(transcript, list(text)) == whole
    source = random.Random(len(text))
    for _ in range(10):
        assert parse(transcript, random_pieces(text, 9, source)) == whole
    return whole


@pytest.mark.parametrize("transcript", [*TRANSCRIPTS, *OF_FAMILIES], ids=lambda transcript: transcript.name)
def test_every_cut_gives_the_same_calls(transcript: Transcript) -> None:
    whole = same_at_every_cut(transcript, symbols_of(transcript).spell(transcript.text))
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == list(transcript.calls)
    assert (whole.content, whole.reasoning) == (transcript.content, transcript.reasoning)
    if transcript.model_ids:
        assert tuple(call.model_id for call in whole.calls) == transcript.model_ids


@pytest.mark.parametrize("transcript", WRITTEN, ids=lambda transcript: transcript.name)
def test_the_same_markers_as_plain_text(transcript: Transcript) -> None:
    """A tokenizer may have none of them as special tokens."""
    plain = Transcript(**{**vars(transcript), "special": ()})
    whole = same_at_every_cut(plain, transcript.text)
    if "while it thinks" not in transcript.name:  # there, only a special token ends the reasoning
        assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == list(transcript.calls)


@pytest.mark.parametrize("transcript", WRITTEN, ids=lambda transcript: transcript.name)
def test_cut_by_max_tokens_the_calls_are_prefixes(transcript: Transcript) -> None:
    text = symbols_of(transcript).spell(transcript.text)
    whole = parse(transcript, [text])
    for end in range(len(text)):
        cut = parse(transcript, [text[:end]], was_cut=True)
        assert len(cut.calls) <= len(whole.calls)
        for part, call in zip(cut.calls, whole.calls, strict=False):
            assert part.name == call.name
            if part is not cut.calls[-1]:
                assert part.arguments == call.arguments
            elif transcript.tool_call_parser in AS_WRITTEN:
                written = call.arguments if "in a string" not in transcript.name else json.dumps(call.arguments)
                assert written.startswith(part.arguments) or part.arguments == call.arguments
            else:  # the value that is cut stays as the model wrote it, which is not JSON
                assert call.arguments.startswith(part.arguments.rpartition(": ")[0])


@pytest.mark.parametrize("transcript", [*TRANSCRIPTS, *OF_FAMILIES], ids=lambda transcript: transcript.name)
def test_one_call_at_most(transcript: Transcript) -> None:
    """The first one, as soon as it is complete: before the next one's name, and nothing is said after it."""
    text = symbols_of(transcript).spell(transcript.text)
    parser = parser_of(transcript, parallel=False)
    end = next(
        (place for place, one in enumerate(text, 1) if parser.push(one) is not None and parser.ended_with_call), 0
    )
    assert bool(end) == bool(transcript.calls)
    whole = parse(transcript, [text], parallel=False)
    assert [(call.name, json.loads(call.arguments)) for call in whole.calls] == list(transcript.calls[:1])
    assert transcript.content.startswith(whole.content)
    assert all(name not in text[:end] for name, _ in transcript.calls[1:])
    for at in range(1, len(text)):
        assert parse(transcript, [text[:at], text[at:]], parallel=False) == whole
    assert parse(transcript, [text[:end]] if end else [text], parallel=False) == whole


@pytest.mark.parametrize("is_plain", [False, True], ids=["special tokens", "plain text"])
@pytest.mark.parametrize("transcript", SEVERAL, ids=lambda transcript: transcript.name)
def test_a_demanded_call_that_is_cut_shows_no_markup(transcript: Transcript, is_plain: bool) -> None:
    """Wherever max_tokens cuts, above all behind the second call's marker: that is a call, or nothing."""
    transcript = Transcript(**{**vars(transcript), "special": ()}) if is_plain else transcript
    text = symbols_of(transcript).spell(transcript.text)
    whole = parse(transcript, [text], must_call=True)
    for end in range(1, len(text)):
        cut = parse(transcript, [text[:end]], must_call=True)
        assert (cut.content, cut.reasoning) == ("", ""), text[:end]
        assert [call.name for call in cut.calls] == [call.name for call in whole.calls][: len(cut.calls)]
        assert cut.calls[:-1] == whole.calls[: len(cut.calls[:-1])]
        assert parse(transcript, list(text[:end]), must_call=True) == cut


def test_a_marker_written_out_is_not_the_token() -> None:
    """Inside a JSON string the characters of the end marker are text; the token itself ends the call."""
    transcript = BY_NAME["hermes one"]
    spelled = symbols_of(transcript).spell
    begin, end = spelled("<tool_call>"), spelled("</tool_call>")
    written = parse(transcript, [begin + '{"name": "now", "arguments": {"a": "</tool_call>"}}' + end])
    assert json.loads(written.calls[0].arguments) == {"a": "</tool_call>"}
    ended = parse(transcript, [begin + '{"name": "now", "arguments": {"a": "x' + end + " rest"])
    assert (ended.calls[0].arguments, ended.content) == ('{"a": "x"}', "rest")


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", '<tool_call>{"name": "no\\u0077", "arguments": {"a": "\\ud800b\\ud83d\\ude00\\udfff"}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": \\"\\\\udfff\\ud800\\"}"}</tool_call>'),
        ("olmo3", "<function_calls>now(a='\\ud800', b='\\d\\udfff')</function_calls>"),
    ],
)
def test_escaped_surrogates_do_not_reach_the_answer(parser: str, text: str) -> None:
    """They are no UTF-8, and would stand for marker tokens."""
    whole = parse(Transcript("", parser, text, special=("<tool_call>",)), [Symbols(("<tool_call>",)).spell(text)])
    (call,) = whole.calls
    arguments = json.loads(call.arguments)
    assert "".join(arguments.values()).encode().count("\ufffd".encode()) == 2


def test_every_family_has_a_transcript() -> None:
    tried = {id(CALLS[transcript.tool_call_parser]) for transcript in EVERYTHING}
    assert [name for name, row in CALLS.items() if id(row) not in tried] == []


def mutated(text: str, source: random.Random) -> str:
    """A few spans of the text removed, doubled or moved."""
    for _ in range(source.randint(1, 4)):
        start = source.randrange(len(text) + 1)
        end = min(len(text), start + source.randint(0, 12))
        place = source.randrange(len(text) + 1)
        match source.randrange(4):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:place] + text[start:end] + text[place:]
            case 2:
                text = text[:place] + source.choice('"{}[]<>=,:\\() \n') + text[place:]
            case _:
                text = text[:start]
        if not text:
            return text
    return text


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(WRITTEN), st.integers(0, 2**32))
def test_broken_outputs_raise_nothing_and_do_not_depend_on_cuts(transcript: Transcript, seed: int) -> None:
    source = random.Random(seed)
    text = mutated(symbols_of(transcript).spell(transcript.text), source)
    whole = parse(transcript, [text])
    assert parse(transcript, list(text)) == whole
    assert parse(transcript, random_pieces(text, 8, source)) == whole
    single = parse(transcript, random_pieces(text, 8, source), parallel=False)
    assert single.calls == whole.calls[:1]
    assert whole.content.startswith(single.content)
    assert single.calls or single == whole
    shown = whole.content + whole.reasoning + "".join(call.name + call.arguments for call in whole.calls)
    assert not any(map(is_symbol, shown))
    assert all(call.name for call in whole.calls)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(WRITTEN), st.integers(0, 2**32))
def test_without_a_call_no_character_is_lost(transcript: Transcript, seed: int) -> None:
    """But for whitespace, and the markers of reasoning and around calls. Reasoning may stand between two texts."""
    symbols = symbols_of(transcript)
    text = mutated(symbols.spell(transcript.text), random.Random(seed))
    whole = parse(transcript, [text])
    if whole.calls or transcript.tool_call_parser == "openai":
        return
    output = output_format(transcript.reasoning_parser, transcript.tool_call_parser)
    reasoning = (output.reasoning.begin, output.reasoning.end) if output.reasoning is not None else ()
    framing = output.calls.around() if output.calls is not None else ()
    given_text, shown = symbols.show(text), whole.reasoning + whole.content
    for marker in (*reasoning, *framing):
        given_text, shown = given_text.replace(marker, ""), shown.replace(marker, "")
    assert sorted("".join(shown.split())) == sorted("".join(given_text.split()))


# A key that a JSON row does not know is passed over with its value, and so is what belongs to an id. A list's element
# may have any name.
JSON_KEY = re.compile(r'"(name|tool_name|arguments|parameters)":|"tool_call_id": "[0-9]"|<item>|</numbers>')


@pytest.mark.parametrize("is_plain", [False, True], ids=["special tokens", "plain text"])
@pytest.mark.parametrize(
    "transcript",
    [one for one in WRITTEN if one.tool_call_parser != "openai"],
    ids=lambda transcript: transcript.name,
)
def test_a_word_that_does_not_belong_there_is_shown(transcript: Transcript, is_plain: bool) -> None:
    """Whatever it breaks: it is part of the text, of the reasoning, of a call's name or of its arguments."""
    transcript = Transcript(**{**vars(transcript), "special": ()}) if is_plain else transcript
    text = symbols_of(transcript).spell(transcript.text)
    keys = [match.span() for match in JSON_KEY.finditer(text)]
    for at in range(len(text) + 1):
        if any(start < at < end for start, end in keys):
            continue
        whole = parse(transcript, [text[:at] + "zebra" + text[at:]])
        calls = [call.name + call.arguments + call.model_id for call in whole.calls]
        assert any("zebra" in part for part in (whole.content, whole.reasoning, *calls)), f"{text[:at]!r} zebra"


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(WRITTEN), st.text(max_size=60), st.integers(0, 2**32))
def test_text_without_markers_is_content_as_it_is(transcript: Transcript, text: str, seed: int) -> None:
    if any(character in text for character in "<[{f\ud800") or transcript.in_reasoning or text[:3] == " to":
        return
    whole = parse(transcript, random_pieces(text, 5, random.Random(seed)))
    assert (whole.content, whole.reasoning, whole.calls) == (text, "", [])


def test_many_begins_without_a_call_are_read_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is given back is read again, from behind each begin marker."""
    num_taken, take = 0, Reader.take

    def counted(reader: Reader) -> Step[str]:
        nonlocal num_taken
        num_taken += 1
        return (yield from take(reader))

    monkeypatch.setattr(Reader, "take", counted)
    num_markers = 600
    text = '<tool_call>{"x": "' * num_markers
    whole = parse(BY_NAME["hermes in plain text"], [text])
    assert (whole.content, whole.calls) == (text, [])
    assert num_taken < num_markers * (MAX_HELD_CHARS + 100)
