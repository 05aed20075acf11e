"""Special tokens in the text that a parser reads: each marker token is one character that no decoded text can hold.

These are lone surrogates, from U+D800 on, which UTF-8 cannot encode. So a marker that the model wrote as its token and
the same characters written out are never confused, and an answer that would show a symbol fails to encode.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

_FIRST, _LAST = 0xD800, 0xDFFF


def is_symbol(character: str) -> bool:
    return _FIRST <= ord(character) <= _LAST


class Symbols:
    """The symbols of marker tokens in the text. tokens: the marker tokens' texts; their order numbers the symbols."""

    def __init__(self, tokens: Sequence[str]) -> None:
        self._symbols = {token: chr(_FIRST + place) for place, token in enumerate(tokens)}
        self._texts = {ord(symbol): token for token, symbol in self._symbols.items()}
        self._longest_first = sorted(self._symbols, key=len, reverse=True)

    def __bool__(self) -> bool:
        return bool(self._symbols)

    def spell(self, text: str) -> str:
        """Returns a marker, or a stop string, as it appears in the text: its tokens as symbols."""
        for token in self._longest_first:
            text = text.replace(token, self._symbols[token])
        return text

    def show(self, text: str) -> str:
        """Returns the text with the tokens written out."""
        return text.translate(self._texts) if self._texts else text

    def by_id(self, token_ids: Mapping[str, int]) -> dict[int, str]:
        return {token_ids[token]: symbol for token, symbol in self._symbols.items() if token in token_ids}


def marker_tokens(markers: Iterable[str], special_tokens: Iterable[str]) -> tuple[str, ...]:
    """Returns the special tokens that are part of a marker, in a fixed order."""
    texts = tuple(markers)
    return tuple(sorted(token for token in special_tokens if token and any(token in text for text in texts)))
