"""Incremental text: equal to decoding all at once, never half a character, independent of how tokens are grouped.

Oracles: the tokenizers library's decode, and a stop search that looks at every end of the whole text.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from gateway_script import DEMO_TARGET
from hypothesis import given, settings
from hypothesis import strategies as st
from small_tokenizers import byte_fallback_tokenizer, wordpiece_tokenizer

from outrider.gateway.request.detokenizer import (
    ByteTextDecoder,
    IncrementalDetokenizer,
    Piece,
    TextEnd,
    WindowTextDecoder,
    make_text_decoder,
)
from outrider.gateway.request.stop_checker import StopChecker
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.tool_calls.plan import OutputPlan

# A busy machine is no failure.
UNHURRIED = settings(deadline=None)
EMOJI = "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽"
texts = st.text(
    st.one_of(st.characters(codec="utf-8"), st.sampled_from("漢字かな" + EMOJI + "é ﬁabcab \n�")), max_size=60
)
# A small alphabet makes stop strings that occur, overlap and nest.
stops = st.lists(st.text("ab漢👩", min_size=1, max_size=4), min_size=0, max_size=4).map(tuple)
stop_texts = st.text("ab漢👩", max_size=40)


@cache
def demo() -> Tokenizer:
    return Tokenizer.load(DEMO_TARGET)


@cache
def byte_fallback() -> Tokenizer:
    return byte_fallback_tokenizer()


@cache
def wordpiece() -> Tokenizer:
    return wordpiece_tokenizer()


def run(detokenizer: IncrementalDetokenizer, groups: Sequence[Sequence[int]]) -> tuple[str, list[Piece]]:
    """All text, as a reader of the stream sees it, and the pieces."""
    pieces = []
    for group in groups:
        pieces.append(detokenizer.process(group))
        if pieces[-1].end is not None:
            break
    return "".join(piece.text for piece in pieces) + detokenizer.finish(), pieces


@st.composite
def groupings(draw: st.DrawFn, num_tokens: int) -> list[int]:
    """Sizes of consecutive groups."""
    sizes: list[int] = []
    while sum(sizes) < num_tokens:
        sizes.append(draw(st.integers(1, num_tokens - sum(sizes))))
    return sizes


def cut(token_ids: Sequence[int], sizes: Sequence[int]) -> list[Sequence[int]]:
    groups, start = [], 0
    for size in sizes:
        groups.append(token_ids[start : start + size])
        start += size
    return groups


def first_stop(text: str, stop: Sequence[str]) -> tuple[int, str] | None:
    """The end of the first occurrence to end, and the longest stop string that ends there."""
    for end in range(1, len(text) + 1):
        found = [entry for entry in stop if text[:end].endswith(entry)]
        if found:
            return end, max(found, key=len)
    return None


# ---- text -------------------------------------------------------------------------------------------------------


@UNHURRIED
@given(texts)
def test_text_comes_back_and_no_character_is_halved(text: str) -> None:
    token_ids = demo().encode(text)
    detokenizer = IncrementalDetokenizer(demo(), [7], skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + detokenizer.finish() == text
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@UNHURRIED
@given(texts)
def test_byte_fallback_text_comes_back(text: str) -> None:
    text = text.replace("▁", "")  # SentencePiece's own mark for a space
    token_ids = byte_fallback().encode(text, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(byte_fallback(), [1], skip_special_tokens=False)
    pieces = [detokenizer.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + detokenizer.finish() == (" " + text if text else "")
    if "�" not in text:
        assert not any("�" in piece for piece in pieces)


@UNHURRIED
@given(st.lists(st.integers(0, 4200), max_size=80), st.booleans())
def test_any_tokens_give_what_decode_gives(token_ids: list[int], skip: bool) -> None:
    """Random ids are mostly broken UTF-8, with special tokens and ids that do not exist in between."""
    text, pieces = run(IncrementalDetokenizer(demo(), (), skip), [[token_id] for token_id in token_ids])
    assert text == demo().decode(token_ids, skip)
    assert all(piece.num_tokens_kept == 1 for piece in pieces)


@UNHURRIED
@given(st.lists(st.sampled_from([2, 3, 4, 5, 6, 7, 8, 9]), max_size=30), st.booleans())
def test_window_decoder_gives_what_decode_gives(token_ids: list[int], skip: bool) -> None:
    detokenizer = IncrementalDetokenizer(wordpiece(), (), skip)
    text, _ = run(detokenizer, [[token_id] for token_id in token_ids])
    assert text == wordpiece().decode(token_ids, skip)


@UNHURRIED
@given(texts)
def test_window_decoder_on_byte_level_tokens(text: str) -> None:
    """The general algorithm must agree with the table where both apply (valid text, no U+FFFD of its own)."""
    text = text.replace("�", "")
    decoder = WindowTextDecoder(demo(), demo().encode("the"), False)
    pieces = [decoder.push(token_id) for token_id in demo().encode(text)]
    assert "".join(pieces) + decoder.flush() == text
    assert not any("�" in piece for piece in pieces)


def test_each_family_gets_its_decoder() -> None:
    assert isinstance(make_text_decoder(demo(), (), True), ByteTextDecoder)
    assert isinstance(make_text_decoder(byte_fallback(), (), True), ByteTextDecoder)
    assert isinstance(make_text_decoder(wordpiece(), (), True), WindowTextDecoder)


def test_window_stays_short_on_bytes_that_never_become_text() -> None:
    half = demo().encode("👧")[0]
    decoder = WindowTextDecoder(demo(), (), True)
    longest = 0
    for _ in range(500):
        decoder.push(half)
        longest = max(longest, len(decoder._window))
    assert longest <= 20
    silent = WindowTextDecoder(demo(), (), True)
    for _ in range(500):
        assert silent.push(0) == ""  # a special token that is skipped
    assert len(silent._window) <= 20


def test_output_completes_a_character_of_the_prompt() -> None:
    token_ids = demo().encode("漢")
    assert len(token_ids) == 3
    detokenizer = IncrementalDetokenizer(demo(), token_ids[:2])
    assert detokenizer.push(token_ids[2]) == "漢"


def test_unfinished_character_shows_at_the_end_only() -> None:
    token_ids = demo().encode("a👧")[:-1]
    detokenizer = IncrementalDetokenizer(demo(), ())
    assert detokenizer.process(token_ids).text == "a"
    assert detokenizer.finish() == "�"
    assert detokenizer.finish() == ""


def test_special_tokens_are_skipped_or_shown() -> None:
    token_ids = demo().encode("hi<|end|>you")
    for skip, expected in ((True, "hiyou"), (False, "hi<|end|>you")):
        assert run(IncrementalDetokenizer(demo(), (), skip), [token_ids])[0] == expected


def test_token_texts_say_what_each_token_completed() -> None:
    piece = IncrementalDetokenizer(demo(), ()).process(demo().encode("字 the"))
    assert piece.token_texts == ("", "", "字", " the")


# ---- stop strings -----------------------------------------------------------------------------------------------


@UNHURRIED
@given(st.data(), stop_texts, stops, st.booleans())
def test_grouping_changes_nothing(data: st.DataObject, text: str, stop: tuple[str, ...], include: bool) -> None:
    token_ids = demo().encode(text)
    sizes = data.draw(groupings(len(token_ids)))

    def stream(groups: list[Sequence[int]]) -> tuple[str, int, str | None]:
        all_text, pieces = run(IncrementalDetokenizer(demo(), (), True, stop, include), groups)
        num_kept = sum(piece.num_tokens_kept for piece in pieces)
        end = pieces[-1].end if pieces else None
        return all_text, num_kept, end.stop_string if end is not None else None

    one_by_one = stream([[token_id] for token_id in token_ids])
    assert stream(cut(token_ids, sizes)) == one_by_one
    found = first_stop(text, stop)
    if found is None:
        assert one_by_one == (text, len(token_ids), None)
    else:
        end, entry = found
        expected = text[:end] if include else text[: end - len(entry)]
        assert one_by_one[0] == expected
        assert one_by_one[2] == entry
        # The last token kept is the one that completed the stop string.
        before = demo().decode(token_ids[: one_by_one[1] - 1])
        assert first_stop(before.rstrip("�"), stop) is None
        assert first_stop(demo().decode(token_ids[: one_by_one[1]]), stop) == found


@UNHURRIED
@given(st.lists(st.text("abc", max_size=5), max_size=8), stops)
def test_only_what_may_become_a_stop_is_held_back(parts: list[str], stop: tuple[str, ...]) -> None:
    checker = StopChecker(stop, include_stop=False)
    given_text = shown = ""
    for part in parts:
        given_text += part
        checked = checker.push(part)
        shown += checked.text
        if checked.stop is not None:
            return
        held = given_text[len(shown) :]
        longest = max(
            (size for entry in stop for size in range(len(entry)) if given_text.endswith(entry[:size])), default=0
        )
        assert given_text.startswith(shown)
        assert len(held) == longest
    assert shown + checker.flush() == given_text


@pytest.mark.parametrize("marker_tokens", [(), ("<|system|>",)], ids=["text", "parsed"])
@pytest.mark.parametrize(
    ("stop", "include", "shown", "found"),
    [
        (("<|user|>",), False, "ab", "<|user|>"),
        (("<|user|>",), True, "ab<|user|>", "<|user|>"),
        (("b<|user|>c",), False, "a", "b<|user|>c"),
        (("<|user|>d", "cd"), False, "ab", "cd"),
        (("<|user|>d",), False, "abcd<|user|>e", None),
        (("<|user|>e",), False, "abcd", "<|user|>e"),
    ],
)
def test_a_stop_string_may_spell_a_special_token(
    stop: tuple[str, ...], include: bool, shown: str, found: str | None, marker_tokens: tuple[str, ...]
) -> None:
    """As a token, which the text leaves out, or written out as a model may do."""
    tokenizer = demo()
    token_ids = [
        *(*tokenizer.encode("ab", False), tokenizer.control_tokens["<|user|>"], *tokenizer.encode("cd", False)),
        *(token_id for part in ("<|", "user", "|>", "e") for token_id in tokenizer.encode(part, False)),
    ]
    for size in (1, 2, len(token_ids)):
        groups = [token_ids[place : place + size] for place in range(0, len(token_ids), size)]
        detokenizer = IncrementalDetokenizer(tokenizer, (), True, stop, include, 0, marker_tokens)
        text, pieces = run(detokenizer, groups)
        ends = [piece.end.stop_string for piece in pieces if piece.end is not None]
        assert (text, ends) == (shown, [found] if found else [])


@pytest.mark.parametrize(
    ("stop", "text", "shown", "found"),
    [
        (("abcd", "bc"), "xabcd", "xa", "bc"),  # ends within the other one
        (("bc", "abc"), "xabc", "x", "abc"),  # ends with it: the longest
        (("abcx", "cd"), "abcd", "ab", "cd"),  # after a beginning that led nowhere
        (("aab",), "aaab", "a", "aab"),  # overlaps its own beginning
        (("a", "b"), "xxb a", "xx", "b"),  # the first in the text, not in the list
    ],
)
def test_overlapping_stop_strings(stop: tuple[str, ...], text: str, shown: str, found: str) -> None:
    for size in (1, 2, len(text)):
        checker = StopChecker(stop, include_stop=False)
        pieces = []
        for start in range(0, len(text), size):
            pieces.append(checker.push(text[start : start + size]))
            if pieces[-1].stop is not None:
                break
        assert "".join(piece.text for piece in pieces) == shown
        assert pieces[-1].stop == found


def test_stop_string_that_is_included_is_not_held_back() -> None:
    checker = StopChecker(("###",), include_stop=True)
    assert checker.push("a##").text == "a##"
    assert checker.push("#b").text == "#"


def test_stop_across_tokens_and_characters() -> None:
    text = "one 漢👩‍👩‍👧 two three"
    token_ids = demo().encode(text)
    detokenizer = IncrementalDetokenizer(demo(), (), True, ("👧 tw",))
    shown, pieces = run(detokenizer, [[token_id] for token_id in token_ids])
    assert shown == "one 漢👩‍👩‍"
    assert pieces[-1].end == TextEnd("👧 tw")
    assert detokenizer.process(token_ids) == Piece(0, "", ())


def test_tokens_after_the_stop_are_not_kept() -> None:
    token_ids = demo().encode("a b c d")
    piece = IncrementalDetokenizer(demo(), (), True, (" b",)).process(token_ids)
    assert piece.num_tokens_kept == len(piece.token_texts) < len(token_ids)
    assert (piece.text, "".join(piece.token_texts)) == ("a", "a b")


def test_min_tokens_come_before_stop_strings() -> None:
    token_ids = demo().encode("a a a a a")
    assert len(token_ids) == 5
    detokenizer = IncrementalDetokenizer(demo(), (), True, (" a",), min_tokens=3)
    shown, pieces = run(detokenizer, [token_ids])
    assert shown == "a a a"
    assert pieces[0].num_tokens_kept == 4


CALL = '<tool_call>{"name": "f", "arguments": {"a": "} b"}}'
ONE_CALL = OutputPlan(tool_call_parser="hermes", properties='{"f": {}}', parallel=False)


def one_call(text: str, sizes: Sequence[int], **fields: Any) -> tuple[int, str, TextEnd | None]:
    """Tokens kept, their text, and the end."""
    detokenizer = IncrementalDetokenizer(demo(), (), only_call=ONE_CALL.parser(), **fields)
    shown, pieces = run(detokenizer, cut(demo().encode(text), sizes))
    return sum(piece.num_tokens_kept for piece in pieces), shown, pieces[-1].end


@UNHURRIED
@given(st.data(), st.text("ab }\n漢", max_size=12), st.sampled_from([(), ("}}",), ("b",), ("}\n",), ("a b", "zz")]))
def test_an_only_call_ends_the_output(data: st.DataObject, around: str, stop: tuple[str, ...]) -> None:
    """With the token that completes it, however tokens are grouped; a stop string that comes before it comes first."""
    text = f"{around}{CALL}{around}\n{CALL}"
    num_tokens = len(demo().encode(text))
    kept, shown, end = one_call(text, [1] * num_tokens, stop=stop)
    assert one_call(text, data.draw(groupings(num_tokens)), stop=stop) == (kept, shown, end)
    assert end is not None
    if not stop:
        assert end == TextEnd()
        token_ids = demo().encode(text)
        assert CALL not in demo().decode(token_ids[: kept - 1])
        assert CALL in demo().decode(token_ids[:kept])


def test_an_only_call_waits_for_min_tokens() -> None:
    num_tokens = len(demo().encode(CALL))
    text = f"{CALL} a a a a"
    for min_tokens in (0, 1, num_tokens, num_tokens + 3):
        kept, _, end = one_call(text, [1000], min_tokens=min_tokens)
        assert (kept, end) == (max(num_tokens, min_tokens), TextEnd())


def test_a_stop_token_is_not_what_completes_the_call() -> None:
    """Its text would; but what the verifier has ended keeps the verifier's reason."""
    token_ids = demo().encode(CALL)
    detokenizer = IncrementalDetokenizer(demo(), (), include_stop_str_in_output=True, only_call=ONE_CALL.parser())
    piece = detokenizer.process(token_ids, ends_with_stop_token=True)
    assert (piece.num_tokens_kept, piece.text, piece.end) == (len(token_ids), CALL, None)


@pytest.mark.parametrize(("include", "expected"), [(False, "a b"), (True, "a b c")])
def test_a_stop_tokens_text(include: bool, expected: str) -> None:
    token_ids = demo().encode("a b c")
    detokenizer = IncrementalDetokenizer(demo(), (), True, (), include)
    piece = detokenizer.process(token_ids, ends_with_stop_token=True)
    assert piece.num_tokens_kept == 3
    assert piece.text + detokenizer.finish() == expected


def test_held_text_is_shown_when_no_stop_came() -> None:
    detokenizer = IncrementalDetokenizer(demo(), (), True, ("bcd",))
    assert detokenizer.process(demo().encode("a bc")).text == "a "
    assert detokenizer.finish() == "bc"
