"""Finds what each token of a tokenizer.json stands for: bytes of text, or a special token's name.

Byte-level BPE and SentencePiece (Metaspace, with or without <0xNN> tokens) have such bytes. Tokenizers whose tokens
depend on their neighbours (WordPiece) do not. Not here: the gateway's tokenizer (it decodes whole outputs), and
matching two vocabularies (mapping.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from outrider.drafting.checkpoints.config_fields import read_json_object
from outrider.drafting.checkpoints.errors import CheckpointRefused, refusing

_SPACE_MARK = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True)
class TokenBytes:
    """The tokens' bytes.

    `ordinary`: id -> bytes, never empty; `special`: id -> name; `fallback`: those of `ordinary` written <0xNN>.
    """

    folder: Path
    backend: tokenizers.Tokenizer
    ordinary: Mapping[int, bytes]
    special: Mapping[int, str]
    fallback: frozenset[int]


def read_token_bytes(folder: Path, vocab_size: int) -> TokenBytes:
    """Reads the bytes of tokens below vocab_size, the model's number of rows.

    Raises CheckpointRefused for a missing or broken tokenizer.json, or tokens without bytes of their own.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointRefused(folder, "it has no tokenizer.json", "save its tokenizer in that format")
    content = read_json_object(file)
    with refusing(file, "reading it"):
        backend = tokenizers.Tokenizer.from_file(str(file))
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        kinds = _decoder_kinds(content.get("decoder"))
    is_byte_level = kinds == ["ByteLevel"]
    if not is_byte_level and kinds != ["Metaspace"] and "ByteFallback" not in kinds:
        named = ", ".join(kinds) or "none"
        cause = (
            f"its tokens have no bytes of their own (decoder {named}; supported: ByteLevel, Metaspace, ByteFallback)"
        )
        raise CheckpointRefused(file, cause)
    vocab = {token_id: token for token, token_id in backend.get_vocab(with_added_tokens=True).items()}
    known = {token_id: token for token_id, token in sorted(vocab.items()) if token_id < vocab_size}
    plain = {token_id: token for token_id, token in known.items() if token_id not in added}
    ordinary = _byte_level(plain) if is_byte_level else {key: _sentencepiece(token) for key, token in plain.items()}
    # Added tokens are stored as plain text, whatever alphabet the others use.
    ordinary |= {key: known[key].encode() for key in known.keys() & added.keys() if not added[key].special}
    fallback = frozenset(key for key, token in plain.items() if not is_byte_level and _BYTE_TOKEN.fullmatch(token))
    return TokenBytes(
        folder=folder,
        backend=backend,
        ordinary={key: ordinary[key] for key in sorted(ordinary) if ordinary[key]},
        special={key: known[key] for key in sorted(known.keys() & added.keys()) if added[key].special},
        fallback=fallback,
    )


def _decoder_kinds(decoder: Any) -> list[str]:
    if decoder is None:
        return []
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return [str(part["type"]) for part in parts]


def _byte_level(tokens: Mapping[int, str]) -> dict[int, bytes]:
    """Decodes tokens by GPT-2's table of printable stand-ins; a token with other characters is plain text."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(plain))
    alphabet = {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
    return {
        token_id: bytes(alphabet[mark] for mark in token) if alphabet.keys() >= set(token) else token.encode()
        for token_id, token in tokens.items()
    }


def _sentencepiece(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()
