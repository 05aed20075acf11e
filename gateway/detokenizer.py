"""Token ids to text while they arrive: never half a character, stop strings found across token borders.

All of it works token by token, so the text and the stop do not depend on how tokens are grouped into commits. The
pieces joined are what `Tokenizer.decode` gives for all tokens at once, up to the stop string.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.stop_checker import StopChecker
from gateway.tokenizer import Tokenizer

# A character has at most 4 bytes, and a token at least one.
_MAX_CHARACTER_BYTES = 4
# Context that the window decoder gives to the first output token, as public servers do.
_NUM_CONTEXT_TOKENS = 6
# A window that has not ended in a whole character after this many tokens never will: its bytes are no text.
_MAX_HELD_TOKENS = 8


class TextDecoder(Protocol):
    """`push` gives the text that a token completes, `flush` what an unfinished character shows as."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class ByteTextDecoder:
    """For tokenizers whose text is the concatenation of their tokens' bytes: one table look-up a token.

    Bytes that are no UTF-8 become one U+FFFD per maximal subpart, as the tokenizers library does for byte-level BPE.
    (Its byte-fallback decoder shows every byte of such a run as U+FFFD; characters already sent cannot be.)
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        # A prompt may end inside of a character; the output then completes it.
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
    """For any other tokenizer: decode a short window with and without the new token, and take the difference."""

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
            if held >= _MAX_HELD_TOKENS:  # only tokens without text: drop them, or the window grows for ever
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


@dataclass(frozen=True)
class Piece:
    """What some tokens add to the output.

    num_tokens_kept: the first so many of the tokens belong to the output; fewer than given only when a stop string
    was completed, the last one kept is the one that completed it.
    text: may be shown now. token_texts: per kept token the text it completed, held back or not.
    stop_reason: the stop string that was found.
    """

    num_tokens_kept: int
    text: str
    token_texts: tuple[str, ...]
    stop_reason: str | None = None


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
    ) -> None:
        """The first `min_tokens` tokens are not searched for stop strings."""
        self._decoder = make_text_decoder(tokenizer, prompt_token_ids, skip_special_tokens)
        self._checker = StopChecker(stop, include_stop_str_in_output) if stop else None
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._stopped = False

    def push(self, token_id: int) -> str:
        """The text that this token completes; stop strings are not looked for."""
        self._num_tokens += 1
        return self._decoder.push(token_id)

    def process(self, token_ids: Sequence[int], *, ends_with_stop_token: bool = False) -> Piece:
        """`ends_with_stop_token`: the last of them is a stop or end-of-sequence token, which is part of the output
        but not of its text, unless the stop is to be included."""
        texts: list[str] = []
        shown: list[str] = []
        stop: str | None = None
        for place, token_id in enumerate(token_ids):
            if self._stopped:
                break
            silent = ends_with_stop_token and not self._include_stop and place == len(token_ids) - 1
            text = "" if silent else self.push(token_id)
            texts.append(text)
            if self._checker is None or self._num_tokens <= self._min_tokens:
                shown.append(text)
                continue
            checked = self._checker.push(text)
            shown.append(checked.text)
            stop = checked.stop
            self._stopped = stop is not None
        return Piece(len(texts), "".join(shown), tuple(texts), stop)

    def finish(self) -> str:
        """The text still held back: the beginning of a stop string that did not come, an unfinished character."""
        if self._stopped:
            return ""
        self._stopped = True
        rest = self._decoder.flush()
        if self._checker is None:
            return rest
        return self._checker.push(rest).text + self._checker.flush()
