"""An upper bound on the characters of text that one token covers, read from tokenizer.json.

With it the servers refuse a text that cannot fit the context without tokenizing it. Conservative: no bound unless every
character is known to survive (not with Unigram and its unknown token, pre-tokenizers that drop spaces, or added tokens
that swallow them).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# characters; longest canonical decomposition, which NFC composes into one (Unicode Standard Annex 15)
_MOST_JOINED_BY_NFC = 4
_PRE_TOKENIZERS_THAT_KEEP = {"ByteLevel", "Metaspace", "Digits"}


def most_chars_per_token(description: Mapping[str, Any], bytes_per_token: Mapping[int, bytes] | None) -> int | None:
    """Returns a bound on the characters that one token covers; None: no known bound. description: tokenizer.json.
    bytes_per_token: the bytes that each id adds to a text.
    """
    model, added = description["model"], description.get("added_tokens") or []
    if not bytes_per_token or model.get("type") != "BPE":
        return None
    pre_tokenizers = _parts(description.get("pre_tokenizer"), "pretokenizers")
    if not _knows_every_character(model, pre_tokenizers, bytes_per_token):
        return None
    if any(token.get("lstrip") or token.get("rstrip") for token in added):
        return None
    if not all(_keeps(part) for part in pre_tokenizers):
        return None
    joined = _most_joined(description.get("normalizer"))
    # A token of n bytes has at most n characters.
    return None if joined is None else joined * max(map(len, bytes_per_token.values()))


def _knows_every_character(
    model: Mapping[str, Any], pre_tokenizers: list[Mapping[str, Any]], bytes_per_token: Mapping[int, bytes]
) -> bool:
    """Returns whether every character of a text has a token.

    Without an unknown token, unknown characters are dropped; with `fuse_unk`, a run of them is one token.
    """
    if model.get("unk_token") is not None and not model.get("fuse_unk"):
        return True
    has_bytes = model.get("byte_fallback") or any(part["type"] == "ByteLevel" for part in pre_tokenizers)
    return bool(has_bytes) and {bytes([byte]) for byte in range(256)} <= set(bytes_per_token.values())


def _parts(component: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    if component is None:
        return []
    return list(component[members]) if component["type"] == "Sequence" else [component]


def _keeps(pre_tokenizer: Mapping[str, Any]) -> bool:
    kind = pre_tokenizer["type"]
    return kind in _PRE_TOKENIZERS_THAT_KEEP or (kind == "Split" and pre_tokenizer.get("behavior") != "Removed")


def _most_joined(normalizer: Mapping[str, Any] | None) -> int | None:
    """Returns the number of input characters per character of the normalized text; None when some are dropped."""
    most = 1
    for part in _parts(normalizer, "normalizers"):
        if part["type"] == "NFC":
            most *= _MOST_JOINED_BY_NFC
        elif part["type"] == "Replace":
            pattern = part["pattern"].get("String")
            if pattern is None or len(part["content"]) < len(pattern):
                return None
        elif part["type"] != "Prepend":
            return None
    return most
