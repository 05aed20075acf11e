"""The sampling parameters: one validated, immutable value that every service uses.

Not here: the HTTP schema (gateway/openai/schema.py) and the arithmetic (engine/sampling/laws.py).
"""

from __future__ import annotations

import enum
import hashlib
import itertools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from outrider.shared.errors import InvalidRequest
from outrider.shared.strict_json import strict_json

# temperature; below it logits / temperature leave float32's range, and the largest logit has all the mass in practice
GREEDY_BELOW = 1e-4
MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
# tokens whose log-probabilities one request names; vLLM's limit
MAX_LOGPROB_TOKEN_IDS = 128
# tokens of one bad word; steps back that each row takes through its output (engine/sampling/bad_words.py)
MAX_BAD_WORD_TOKENS = 128
# tokens of all bad words of a request; a session holds about 0.3 KB for each, 5 MB at most
MAX_BAD_WORDS_TOKENS = 16_384
# requests; cached sizes of bad words: each service checks every output of a request, 1 ms for 1,024 words
_NUM_MEASURED = 16
# tokens; the longest marker of formats.py has three
_MAX_THINKING_MARKER_TOKENS = 16
# In front of a comment at the end of a rule of a Lark grammar, "FIELD: PLACE": the part of the request that it is from.
REMARK = "// from "


class SpeculationMode(enum.Enum):
    """The losslessness guarantee of a session (docs/correctness.md)."""

    EXACT = "exact"
    REJECTION = "rejection"


class GrammarKind(enum.Enum):
    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"


@dataclass(frozen=True)
class Grammar:
    kind: GrammarKind
    text: str

    def choices(self) -> list[str]:
        """The allowed strings of a CHOICE grammar. Raises InvalidRequest."""
        choices = self._json()
        if not (isinstance(choices, list) and choices and all(isinstance(text, str) and text for text in choices)):
            raise InvalidRequest("grammar: choices must be a JSON list of non-empty strings", param="grammar")
        return choices

    def json_schema(self) -> Any:
        """The schema of a JSON_SCHEMA grammar. Raises InvalidRequest."""
        return self._json()

    def check_text(self) -> None:
        """Checks a grammar that is JSON. Raises InvalidRequest if it cannot be read."""
        if self.kind is GrammarKind.CHOICE:
            self.choices()
        elif self.kind is GrammarKind.JSON_SCHEMA:
            self.json_schema()

    def _json(self) -> Any:
        return strict_json(self.text, f"grammar: a {self.kind.value}", "grammar")


@dataclass(frozen=True)
class ThinkingBudget:
    """The limit on an output's thinking before its answer.

    max_tokens: over all thinking of the output, markers not counted. end_token_id: what must follow them.
    begin_token_ids: the tokens that open thinking. call_token_ids: those that open a tool call, which ends thinking
    too. starts_open: the prompt has opened it.
    """

    max_tokens: int
    end_token_id: int
    begin_token_ids: tuple[int, ...] = ()
    call_token_ids: tuple[int, ...] = ()
    starts_open: bool = False


@dataclass(frozen=True)
class SamplingParams:
    """Names and defaults of vLLM's SamplingParams; `validate` checks the ranges.

    logprob_token_ids: with num_logprobs, the tokens whose log-probabilities are wanted in place of the likeliest ones'.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 16
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    grammar: Grammar | None = None
    thinking_budget: ThinkingBudget | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def default_mode(self) -> SpeculationMode:
        """Exact where callers expect reproducible output: with a seed, or at temperature 0."""
        exact = self.greedy or self.seed is not None
        return SpeculationMode.EXACT if exact else SpeculationMode.REJECTION

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequest that names the first field out of range."""
        _check_range("temperature", self.temperature, 0.0, 100.0)
        _check_range("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequest("top_p must be in (0, 1]", param="top_p")
        _check_range("top_k", self.top_k, 0, 2**31 - 1)
        _check_range("min_p", self.min_p, 0.0, 1.0)
        _check_range("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_range("repetition_penalty", self.repetition_penalty, 1e-3, 100.0)
        if self.seed is not None:
            _check_range("seed", self.seed, 0, MAX_SEED)
        for name, count in (("logprobs", self.num_logprobs), ("prompt_logprobs", self.num_prompt_logprobs)):
            if count is not None:
                _check_range(name, count, 0, MAX_LOGPROBS)
        self._check_logprob_token_ids()
        if not all(-100.0 <= bias <= 100.0 for _, bias in self.logit_bias):
            for _, bias in self.logit_bias:
                _check_range("logit_bias", bias, -100.0, 100.0)
        self._check_bad_words()
        if self.thinking_budget is not None:
            _check_range("thinking_token_budget", self.thinking_budget.max_tokens, 0, 2**31 - 1)
            num_begin = len(self.thinking_budget.begin_token_ids)
            _check_range("thinking_budget.begin_token_ids: length", num_begin, 0, _MAX_THINKING_MARKER_TOKENS)
        if vocab_size is not None:
            self._check_token_ids(vocab_size)

    def _check_logprob_token_ids(self) -> None:
        name, count = "logprob_token_ids", len(self.logprob_token_ids)
        if count > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(f"{name} has {count} tokens, the most is {MAX_LOGPROB_TOKEN_IDS}", param=name)
        if count and self.num_logprobs is None:
            raise InvalidRequest(f"{name} needs logprobs", param=name)

    def _check_bad_words(self) -> None:
        if not self.bad_words:
            return
        sizes = _sizes(self.bad_words)
        if sizes.shortest == 0:
            raise InvalidRequest("bad_words: a word without tokens", param="bad_words")
        if sizes.longest > MAX_BAD_WORD_TOKENS:
            raise InvalidRequest(
                f"bad_words: a word of {sizes.longest} tokens, the most is {MAX_BAD_WORD_TOKENS}", param="bad_words"
            )
        if sizes.total > MAX_BAD_WORDS_TOKENS:
            raise InvalidRequest(
                f"bad_words: {sizes.total} tokens in all, the most is {MAX_BAD_WORDS_TOKENS}", param="bad_words"
            )

    def _check_token_ids(self, vocab_size: int) -> None:
        budget = self.thinking_budget
        fields = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logprob_token_ids": self.logprob_token_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.logit_bias),
            "bad_words": _sizes(self.bad_words).extremes if self.bad_words else (),
            "thinking_token_budget": (budget.end_token_id,) if budget is not None else (),
        }
        for name, token_ids in fields.items():
            if token_ids and not (0 <= min(token_ids) and max(token_ids) < vocab_size):
                token_id = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
                raise InvalidRequest(
                    f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})", param=name
                )


@dataclass(frozen=True)
class _Sizes:
    """Sizes of bad words, in tokens: the shortest, the longest, all. extremes: the smallest and largest token id."""

    shortest: int
    longest: int
    total: int
    extremes: tuple[int, ...]


@lru_cache(maxsize=_NUM_MEASURED)
def _sizes(words: tuple[tuple[int, ...], ...]) -> _Sizes:
    lengths = [len(word) for word in words]
    token_ids = list(itertools.chain.from_iterable(words))
    extremes = (min(token_ids), max(token_ids)) if token_ids else ()
    return _Sizes(min(lengths), max(lengths), sum(lengths), extremes)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {value!r}", param=name)


def stream_key(seed: int, prompt_token_ids: Sequence[int], choice_index: int) -> int:
    """Returns the 64-bit key of a choice's noise: one seed gives different noise for different prompts and choices."""
    digest = hashlib.blake2b(digest_size=8, person=b"outrider-noise")
    digest.update(struct.pack("<QII", seed & MAX_SEED, choice_index, len(prompt_token_ids)))
    digest.update(struct.pack(f"<{len(prompt_token_ids)}I", *prompt_token_ids))
    return int.from_bytes(digest.digest(), "little")
