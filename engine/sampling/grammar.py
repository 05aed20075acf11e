"""Grammars for outputs: the tokens that may come next, anywhere on a draft path.

llguidance does the matching; this moves its matcher along paths. A matcher has one position; `allowed` rolls back to
the common prefix of the two paths and consumes the rest: chains, trees and repeated steps need no state of their own.
"""

from __future__ import annotations

import functools
import hashlib
import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from numpy.typing import NDArray

from outrider.engine.sampling.grammar_check import PARSER_LIMITS, GrammarCheck, refusal
from outrider.engine.sampling.prefixes import common_prefix_len
from outrider.shared.errors import InvalidRequest
from outrider.shared.sampling_params import Grammar, GrammarKind

# Without this option llguidance 1.9 follows forced bytes, without end in `start: /b+/ /b+/` (log: 75531ca). Masks need
# none.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
_GBNF_HEADER = "%llguidance {}\n"  # written by the converter; a grammar may have only one such line
# grammars; most that are cached for further requests; 64 MiB each at worst (grammar_check.py), usually 2 MB
_MAX_KNOWN = 16
# seconds of CPU; limit of a session's mean time per mask, and an allowance beyond it; schemas take 0.0001 to 0.003, an
# ambiguous grammar 0.2 by its 400th token, and all sessions of a batch wait for it
_ROW_S, _ALLOWANCE_S = 0.005, 0.2
# tokens; most spellings of a forced text that are compared; a token of n bytes has at most n beginnings
_MAX_SPELLINGS = 32


class GrammarCompiler:
    """Compiles grammars for one tokenizer; its trie is built once, about a second at 128k tokens.

    Another process has first compiled the grammar within limits. May be called from any thread.
    """

    def __init__(self, model_path: str, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_path = Path(model_path) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._check = GrammarCheck(self._tokenizer_path, vocab_size, eos_token_ids)
        self._lock = threading.Lock()
        # Maps the digest of the source -> its matcher, or the error of a refused grammar; the most recently used one
        # last.
        self._known: OrderedDict[bytes, LLMatcher | InvalidRequest] = OrderedDict()

    @functools.cached_property
    def _tokenizer(self) -> LLTokenizer:
        if not self._tokenizer_path.is_file():
            raise InvalidRequest("grammars need the checkpoint's tokenizer.json, which is missing", param="grammar")
        return LLTokenizer(str(self._tokenizer_path), n_vocab=self._vocab_size, eos_token=self._eos_token_ids)

    def compile(self, grammar: Grammar) -> GrammarState:
        """Returns the matcher of a grammar.

        Raises InvalidRequest with llguidance's message if the grammar is invalid or beyond the limits, Overloaded when
        too many are being compiled.
        """
        try:
            source = _source(grammar)
        except ValueError as error:
            raise InvalidRequest(f"grammar: {error}", param="grammar") from None
        digest = hashlib.sha256(source.encode()).digest()
        known = self._find(digest)
        if known is None:
            with self._check.turn():
                known = self._find(digest) or self._try(source)
        with self._lock:
            self._known[digest] = known
            self._known.move_to_end(digest)
            if len(self._known) > _MAX_KNOWN:
                self._known.popitem(last=False)
            if isinstance(known, InvalidRequest):
                raise InvalidRequest(known.message, param=known.param)
            return GrammarState(known.deep_copy(), self._vocab_size, self._token_bytes)

    def _token_bytes(self, token_id: int) -> bytes:
        return self._tokenizer.decode_bytes([token_id])

    def _find(self, digest: bytes) -> LLMatcher | InvalidRequest | None:
        with self._lock:
            return self._known.get(digest)

    def _try(self, source: str) -> LLMatcher | InvalidRequest:
        try:
            tokenizer = self._tokenizer
            self._check.check(source)
        except InvalidRequest as error:
            return error
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=PARSER_LIMITS)
        if matcher.is_error():
            return refusal(matcher.get_error())
        return matcher


@dataclass
class MaskTime:
    """The CPU time of one session's masks, those of its drafts included."""

    seconds: float = 0.0


class GrammarState:
    """One session's matcher. Not for use from two threads at a time."""

    def __init__(
        self,
        matcher: LLMatcher,
        vocab_size: int,
        token_bytes: Callable[[int], bytes],
        clock: Callable[[], float] = time.thread_time,
        spent: MaskTime | None = None,
    ) -> None:
        """Starts at the grammar's beginning, where matcher is. clock: CPU seconds of the calling thread. spent: by the
        session so far; None: nothing.
        """
        self._at_start = matcher
        self._matcher = matcher.deep_copy()
        self._consumed: list[int] = []
        # The mask at the matcher's position; None: not computed yet.
        self._mask: NDArray[np.bool_] | None = None
        self._bitmask = allocate_token_bitmask(1, vocab_size)
        self._vocab_size = vocab_size
        self._token_bytes = token_bytes
        self._clock = clock
        self._left_s = _ALLOWANCE_S
        self.spent = MaskTime() if spent is None else spent

    def allowed(self, output_token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """Returns bool [V], read-only: the tokens that may follow this output; none if it violates the grammar.

        End-of-sequence tokens are among them where the grammar may end. The last answer is kept: a round asks what may
        follow its last token, and the next one asks again. Raises InvalidRequest where that takes more work than the
        limits allow (PARSER_LIMITS, _ROW_S).
        """
        if self._mask is not None and self._consumed == list(output_token_ids):
            return self._mask
        started = self._clock()
        mask = self._mask_after(output_token_ids)
        took_s = self._clock() - started
        self.spent.seconds += took_s
        self._left_s += _ROW_S - took_s
        if self._left_s < 0.0:
            raise InvalidRequest(
                f"grammar: each token takes more than {1e3 * _ROW_S:g} ms to check, the limit; make it less ambiguous",
                param="grammar",
            )
        return mask

    def forced(self, output_token_ids: Sequence[int]) -> int | None:
        """Returns the token that must follow, or the longest of several that spell the beginning of one text.

        None where the grammar leaves a choice of texts. Raises as `allowed` does.
        """
        allowed = self.allowed(output_token_ids).nonzero()[0]
        if not 0 < len(allowed) <= _MAX_SPELLINGS:
            return None
        texts = {self._token_bytes(int(token_id)): int(token_id) for token_id in allowed}
        longest = max(texts, key=len)
        return texts[longest] if all(map(longest.startswith, texts)) else None

    def _mask_after(self, output_token_ids: Sequence[int]) -> NDArray[np.bool_]:
        is_there = self._move_to(output_token_ids)
        if is_there:
            fill_next_token_bitmask(self._matcher, self._bitmask)
        if self._matcher.is_error():  # its mask is the end then, and a matcher never leaves this state
            error = refusal(self._matcher.get_error())
            self._matcher, self._consumed, self._mask = self._at_start.deep_copy(), [], None
            raise error
        if not is_there:
            return np.zeros(self._vocab_size, dtype=np.bool_)
        bits = np.unpackbits(self._bitmask[0].view(np.uint8), bitorder="little")
        self._mask = bits[: self._vocab_size].astype(np.bool_)
        return self._mask

    def twin(self) -> GrammarState:
        """Returns another matcher of the same grammar and session, without recompiling it."""
        return GrammarState(self._at_start, self._vocab_size, self._token_bytes, self._clock, self.spent)

    def _move_to(self, token_ids: Sequence[int]) -> bool:
        consumed = self._consumed
        shared = common_prefix_len(consumed, token_ids)
        if shared < len(consumed):
            self._mask = None
            self._matcher.rollback(len(consumed) - shared)
            del consumed[shared:]
        for token_id in token_ids[shared:]:
            # Validated first: the matcher's error state cannot be rolled back.
            if self._matcher.is_stopped() or not self._matcher.validate_tokens([token_id]):
                return False
            self._mask = None
            self._matcher.consume_token(token_id)
            consumed.append(token_id)
        return True


def _as_lark(text: str) -> str:
    """Returns the grammar in Lark's notation, converted if it is in GBNF. Raises InvalidRequest."""
    if is_lark_syntax(text) or "::=" not in text:
        return text
    try:
        return gbnf_to_lark(text).removeprefix(_GBNF_HEADER)
    except RecursionError:
        raise InvalidRequest("grammar: as GBNF: it is nested too deeply", param="grammar") from None
    except Exception as error:  # the converter raises bare Exceptions
        raise InvalidRequest(f"grammar: as GBNF: {str(error)[:200]}", param="grammar") from None


def _source(grammar: Grammar) -> str:
    if grammar.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(grammar.text))
    if grammar.kind is GrammarKind.LARK:
        if "%llguidance" in grammar.text:
            raise InvalidRequest("grammar: the directive %llguidance is not allowed", param="grammar")
        return str(LLMatcher.grammar_from_lark(_OPTIONS + _as_lark(grammar.text)))
    if grammar.kind is GrammarKind.CHOICE:
        options = " | ".join(json.dumps(choice) for choice in grammar.choices())
        return str(LLMatcher.grammar_from_lark(f"{_OPTIONS}start: {options}"))
    schema = {"type": "object"} if grammar.kind is GrammarKind.JSON_OBJECT else grammar.json_schema()
    return str(LLMatcher.grammar_from_json_schema(schema))
