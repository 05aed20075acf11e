"""Byte-level tokenizers with a family's special tokens, and walks through a grammar over them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from outrider.engine.sampling.grammar import GrammarCompiler, GrammarState
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.sampling_params import Grammar

EOS = "<|eos|>"
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}<|assistant|>"
)


@cache
def backend_of(special: tuple[str, ...], plain: tuple[str, ...] = ()) -> tokenizers.Tokenizer:
    """One token per byte, then a few of several characters, then the special ones. `plain`: added, but not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["th", "the", "in", "ing", '":', '",', '{"', "}}", "Ġ{"]
    pieces = sorted({word[:size] for word in words for size in range(1, len(word) + 1)} - set(alphabet), key=len)
    vocab = {token: place for place, token in enumerate([*alphabet, *pieces])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[(piece[:-1], piece[-1]) for piece in pieces]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True) for text in (EOS, *special)])
    backend.add_tokens([AddedToken(text, special=False) for text in plain])
    return backend


def tokenizer_of(special: tuple[str, ...], template: str | None = TEMPLATE, plain: tuple[str, ...] = ()) -> Tokenizer:
    backend = tokenizers.Tokenizer.from_str(backend_of(special, plain).to_str())
    return Tokenizer(backend, {"eos_token": EOS}, template)


@cache
def compiler_of(special: tuple[str, ...]) -> GrammarCompiler:
    backend, folder = backend_of(special), Path(mkdtemp())
    backend.save(str(folder / "tokenizer.json"))
    return GrammarCompiler(str(folder), backend.get_vocab_size(), [backend.token_to_id(EOS)])


def fits(state: GrammarState, token_ids: Sequence[int], eos: int) -> bool:
    """Whether the grammar lets these tokens be written, and the output end after them."""
    return all(state.allowed(token_ids[:place])[token] for place, token in enumerate(token_ids)) and bool(
        state.allowed(token_ids)[eos]
    )


def accepts(grammar: Grammar, special: tuple[str, ...], text: str) -> bool:
    backend = backend_of(special)
    state = compiler_of(special).compile(grammar)
    return fits(state, backend.encode(text, add_special_tokens=False).ids, backend.token_to_id(EOS))


def random_walk(grammar: Grammar, special: tuple[str, ...], source: random.Random, longest: int) -> list[int] | None:
    """Tokens that the grammar allows, drafts that are thrown away between them; None if `longest` do not end it.

    Ends and closing characters are preferred, as a random text would go on for ever.
    """
    backend = backend_of(special)
    state, eos = compiler_of(special).compile(grammar), backend.token_to_id(EOS)
    closing = [token for text in '"}],>' if (token := backend.token_to_id(text)) is not None]
    closing += [backend.token_to_id(text) for text in special]
    path: list[int] = []
    while len(path) < longest:
        mask = state.allowed(path)
        if mask[eos] and source.random() < 0.7:
            return path
        allowed = [int(token) for token in mask.nonzero()[0] if token != eos]
        if not allowed:
            return path if mask[eos] else None
        ends = [token for token in closing if mask[token]]
        state.allowed([*path, source.choice(allowed)])  # the matcher goes there and must come back
        path.append(source.choice(ends) if ends and source.random() < 0.6 else source.choice(allowed))
    return None


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
