"""Turns token ids into text as they arrive: only whole characters, stop strings found across token boundaries.

Everything works token by token, so text and stops do not depend on how tokens are grouped into commits. The joined
pieces equal `Tokenizer.decode` of all tokens, up to the stop string, or to the token that completes the only call.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from outrider.gateway.request.stop_checker import StopChecker
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.gateway.tool_calls.parser import OutputParser
from outrider.gateway.tool_calls.symbols import Symbols

# bytes; longest UTF-8 character, and each token has at least one byte
_MAX_CHARACTER_BYTES = 4
# tokens; context for decoding the first output token, as in vLLM and TGI
_NUM_CONTEXT_TOKENS = 6
# tokens; a window without a whole character after this many is not text
_MAX_HELD_TOKENS = 8


class TextDecoder(Protocol):
    """Decoder of one output's tokens. `push` returns the text that a token completes, `flush` how an unfinished
    character is shown.
    """

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ByteTextDecoder:
    """Decoder for tokenizers whose text is the concatenation of their tokens' bytes: one table look-up per token.

    Invalid UTF-8 becomes one U+FFFD per maximal subpart, as the tokenizers library does for byte-level BPE. (Its
    byte-fallback decoder shows every byte of such a run as U+FFFD; characters already sent cannot be changed.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt may end inside a character, which the output then completes.
        self._utf8.decode(self._last_bytes(prompt_token_ids))

    def _last_bytes(self, prompt_token_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._skipped:
                tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _MAX_CHARACTER_BYTES:
                break
        return tail

    def push(self, token_id: int) -> str:
        if token_id in self._skipped:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowTextDecoder:
    """Decoder for other tokenizers: decodes a short window with and without the new token, and takes the difference."""

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        # [0, read) has been shown and is the context of [read, end), which has not.
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._read = len(self._window)

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._pending()
        held = len(self._window) - self._read
        if not text or (text.endswith("�") and held < _MAX_HELD_TOKENS):
            if held >= _MAX_HELD_TOKENS:  # only tokens without text: drop them, or the window grows forever
                del self._window[self._read :]
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        return text

    def _pending(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._read])) :]

    def flush(self) -> str:
        text = self._pending()
        self._read = len(self._window)
        return text


def make_text_decoder(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> TextDecoder:
    kind = ByteTextDecoder if tokenizer.has_token_bytes else WindowTextDecoder
    return kind(tokenizer, prompt_token_ids, skip_special_tokens)


class MarkerTextDecoder:
    """Wraps another decoder: shows each marker token as one symbol, whatever text is pending before it."""

    def __init__(self, decoder: TextDecoder, symbols: Mapping[int, str]) -> None:
        self._decoder = decoder
        self._symbols = symbols

    def push(self, token_id: int) -> str:
        symbol = self._symbols.get(token_id)
        return self._decoder.push(token_id) if symbol is None else self._decoder.flush() + symbol

    def flush(self) -> str:
        return self._decoder.flush()


@dataclass(frozen=True)
class TextEnd:
    """The text that ended an output: a stop string, or (None) the only call that it may have."""

    stop_string: str | None = None


@dataclass(frozen=True)
class Piece:
    """The part of the output that some tokens add.

    num_tokens_kept: how many of the tokens belong to the output; fewer than given only if one completed its `end`,
    which is the last kept. text: may be shown now. token_texts: per kept token the text it completed, shown or not.
    """

    num_tokens_kept: int
    text: str
    token_texts: tuple[str, ...]
    end: TextEnd | None = None


class IncrementalDetokenizer:
    """One choice's output. Call `process` per commit, then `finish` once at the end."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
        marker_tokens: tuple[str, ...] = (),
        only_call: OutputParser | None = None,
    ) -> None:
        """The first `min_tokens` tokens are not searched for stop strings. marker_tokens: shown as symbols. only_call:
        a parser that the output ends with, but not before `min_tokens` tokens.
        """
        self._decoder = make_text_decoder(tokenizer, prompt_token_ids, skip_special_tokens)
        # Special tokens that the text leaves out, and a stop string spells: symbols that only the search sees.
        hidden = _hidden_tokens(tokenizer, stop, marker_tokens) if skip_special_tokens else ()
        symbols = Symbols((*marker_tokens, *hidden))
        by_id = symbols.by_id(tokenizer.control_tokens)
        self._hidden = {tokenizer.control_tokens[token]: by_id.pop(tokenizer.control_tokens[token]) for token in hidden}
        self._left_out = {ord(symbol): "" for symbol in self._hidden.values()}
        self._written_out = {ord(symbol): symbols.show(symbol) for symbol in self._hidden.values()}
        if by_id:
            self._decoder = MarkerTextDecoder(self._decoder, by_id)
        written = Symbols(marker_tokens)
        self._stops = {spelled: text for text in stop for spelled in (written.spell(text), symbols.spell(text))}
        self._checker = StopChecker(tuple(self._stops), include_stop_str_in_output) if stop else None
        self._include_stop = include_stop_str_in_output
        self._only_call = only_call
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(self, token_id: int) -> str:
        """Returns the text that this token completes; does not look for stop strings."""
        self._num_tokens += 1
        return self._decoder.push(token_id)

    def process(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> Piece:
        """Processes a commit's tokens. ends_with_stop_token: the last one is a stop or end-of-sequence token, which is
        in the output but not in its text, unless stops are included.
        """
        texts: list[str] = []
        shown: list[str] = []
        end: TextEnd | None = None
        for place, token_id in enumerate(token_ids):
            if self._stopped:
                break
            is_stop_token = ends_with_stop_token and place == len(token_ids) - 1
            texts.append("" if is_stop_token and not self._include_stop else self.push(token_id))
            text, end = self._searched(texts[-1] + ("" if is_stop_token else self._hidden.get(token_id, "")))
            shown.append(text)
            if end is None and not is_stop_token and self._completes_call(text):
                end = TextEnd()
            self._stopped = end is not None
        return Piece(len(texts), "".join(shown), tuple(texts), end)

    def _searched(self, text: str) -> tuple[str, TextEnd | None]:
        """Returns the text that may be shown once `text` is added, and the stop string that `text` completes."""
        if self._checker is None or self._num_tokens <= self._min_tokens:
            return text.translate(self._left_out), None
        checked = self._checker.push(text)
        if checked.stop is None:
            return checked.text.translate(self._left_out), None
        return checked.text.translate(self._written_out), TextEnd(self._stops[checked.stop])

    def _completes_call(self, shown: str) -> bool:
        if self._only_call is None:
            return False
        self._only_call.push(shown)
        return self._only_call.ended_with_call and self._num_tokens >= self._min_tokens

    def finish(self) -> str:
        """Returns the text held back until now: the start of a stop string, or an unfinished character."""
        if self._stopped:
            return ""
        self._stopped = True
        rest = self._decoder.flush()
        if self._checker is None:
            return rest
        return (self._checker.push(rest).text + self._checker.flush()).translate(self._left_out)


def _hidden_tokens(tokenizer: Tokenizer, stop: tuple[str, ...], marker_tokens: tuple[str, ...]) -> tuple[str, ...]:
    special = tokenizer.special_ids
    tokens = (token for token, token_id in tokenizer.control_tokens.items() if token_id in special)
    return tuple(
        token for token in tokens if token and token not in marker_tokens and any(token in text for text in stop)
    )
