"""Grammars that an output must follow: which tokens may come next, anywhere on a draft path.

llguidance does the work; here is only the bookkeeping that its matcher follows the path a row stands on. A matcher
holds one position; `allowed` moves it there by rolling back to what the two paths share and consuming the rest, so
chains, trees and repeated steps need no states of their own.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from shared.errors import InvalidRequest
from shared.sampling_params import Grammar, GrammarKind

# Without it llguidance 1.9 follows the only bytes that may come next for as long as there are such: for ever in
# `start: /b+/ /b+/`, whose first b+ takes every b. Masks need no forced bytes.
_OPTIONS = '%llguidance {"no_forcing": true}\n'


class GrammarCompiler:
    """Compiles grammars for one tokenizer; building the tokenizer's trie costs about a second at 128k tokens, once."""

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_path = Path(model_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._tokenizer_path.is_file():
            raise InvalidRequest("grammars need the checkpoint's tokenizer.json, which is missing", param="grammar")
        return LLTokenizer(str(self._tokenizer_path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)

    def compile(self, grammar: Grammar) -> GrammarState:
        """Raises InvalidRequest with llguidance's own words when the grammar is not understood."""
        try:
            matcher = LLMatcher(self._tokenizer, _source(grammar), log_level=0)
        except ValueError as error:
            raise InvalidRequest(f"grammar: {error}", param="grammar") from None
        if matcher.is_error():
            raise InvalidRequest(f"grammar: {matcher.get_error()}", param="grammar")
        return GrammarState(matcher, self._vocab_size)


class GrammarState:
    """One session's matcher. Not for use from two threads at a time."""

    def __init__(self, matcher: LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._consumed: list[int] = []
        self._bitmask = allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size

    def allowed(self, output_token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """bool [V]: tokens that may follow these output tokens; none when they have left the grammar already."""
        if not self._move_to(output_token_ids):
            return np.zeros(self._vocab_size, dtype=np.bool_)
        fill_next_token_bitmask(self._matcher, self._bitmask)
        bits = np.unpackbits(self._bitmask[0].view(np.uint8), bitorder="little")
        return bits[: self._vocab_size].astype(np.bool_)

    def twin(self) -> GrammarState:
        """Another matcher of the same grammar, without compiling it anew."""
        twin = GrammarState(self._matcher.deep_copy(), self._vocab_size)
        twin._consumed = list(self._consumed)
        return twin

    def _move_to(self, token_ids: Sequence[int]) -> bool:
        consumed = self._consumed
        shared = 0
        while shared < min(len(consumed), len(token_ids)) and consumed[shared] == token_ids[shared]:
            shared += 1
        if shared < len(consumed):
            self._matcher.rollback(len(consumed) - shared)
            del consumed[shared:]
        for token_id in token_ids[shared:]:
            # Asking first keeps the matcher out of its error state, which cannot be rolled back.
            if self._matcher.is_stopped() or not self._matcher.validate_tokens([token_id]):
                return False
            self._matcher.consume_token(token_id)
            consumed.append(token_id)
        return True


def _source(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind is GrammarKind.LARK:
        if "%llguidance" in grammar.text:
            raise InvalidRequest("grammar: the directive %llguidance is not allowed", param="grammar")
        return str(LLMatcher.grammar_from_lark(_OPTIONS + grammar.text))
    if grammar.kind is GrammarKind.CHOICE:
        options = " | ".join(json.dumps(choice) for choice in grammar.choices())
        return str(LLMatcher.grammar_from_lark(f"{_OPTIONS}start: {options}"))
    schema = {"type": "object"} if grammar.kind is GrammarKind.JSON_OBJECT else grammar.json_schema()
    return str(LLMatcher.grammar_from_json_schema(schema))
