"""How tokens are drawn: one validated, immutable value that every service understands.

Not here: the HTTP schema (gateway/openai_schema.py) and the arithmetic (engine/sampling.py).
"""

from __future__ import annotations

import enum
import json
import math
from dataclasses import dataclass
from typing import Any

from shared.errors import InvalidRequest

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20


class SpeculationMode(enum.Enum):
    """Which promise holds for a session (docs/correctness.md)."""

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
        """What a grammar of the kind CHOICE allows. Raises InvalidRequest."""
        choices = self._json()
        if not (isinstance(choices, list) and choices and all(isinstance(text, str) and text for text in choices)):
            raise InvalidRequest("grammar: choices must be a JSON list of strings that are not empty", param="grammar")
        return choices

    def json_schema(self) -> Any:
        """The schema of a grammar of the kind JSON_SCHEMA. Raises InvalidRequest."""
        return self._json()

    def _json(self) -> Any:
        try:
            return json.loads(self.text)
        except (ValueError, RecursionError):
            raise InvalidRequest(
                f"grammar: a {self.kind.value} must be JSON, nested a few hundred deep at most", param="grammar"
            ) from None


@dataclass(frozen=True)
class SamplingParams:
    """Names and defaults of vLLM's SamplingParams; `validate` holds their ranges."""

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
    grammar: Grammar | None = None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def default_mode(self) -> SpeculationMode:
        """Exact where a caller can expect the same output twice: a seed, or temperature 0."""
        exact = self.greedy or self.seed is not None
        return SpeculationMode.EXACT if exact else SpeculationMode.REJECTION

    def validate(self, vocab_size: int | None = None) -> None:
        """Raises InvalidRequest that names the first field out of range."""
        _check_range("temperature", self.temperature, 0.0, 100.0)
        if 0.0 < self.temperature < 1e-4:
            raise InvalidRequest("temperature must be 0 or at least 0.0001", param="temperature")
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
        for _, bias in self.logit_bias:
            _check_range("logit_bias", bias, -100.0, 100.0)
        if () in self.bad_words:
            raise InvalidRequest("bad_words: a word without tokens", param="bad_words")
        if vocab_size is not None:
            self._check_token_ids(vocab_size)

    def _check_token_ids(self, vocab_size: int) -> None:
        fields = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": tuple(token_id for token_id, _ in self.logit_bias),
            "bad_words": tuple(token_id for word in self.bad_words for token_id in word),
        }
        for name, token_ids in fields.items():
            for token_id in token_ids:
                if not 0 <= token_id < vocab_size:
                    raise InvalidRequest(
                        f"{name}: token id {token_id} is outside the vocabulary [0, {vocab_size})", param=name
                    )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InvalidRequest(f"{name} must be between {low:g} and {high:g}, got {value!r}", param=name)
