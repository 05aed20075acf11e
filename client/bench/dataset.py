"""A benchmark's prompts: random words of a given length, or the lines of a file.

No tokenizer is needed: the server's usage counts show how many tokens a word takes (`WordLength.fit`).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.shared.errors import ConfigError

# Common words: most vocabularies have one token for each.
_WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
""".split()  # noqa: SIM905


@dataclass(frozen=True)
class BenchPrompt:
    """A chat's `messages`, or a completion's `text`. max_tokens 0: the benchmark's default."""

    text: str
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: int = 0

    def fields(self, is_chat: bool) -> dict[str, Any]:
        """The prompt's fields of the request body."""
        if is_chat:
            return {"messages": list(self.messages) or [{"role": "user", "content": self.text}]}
        return {"prompt": self.text}


@dataclass(frozen=True)
class WordLength:
    """Token count of an n-word prompt: n * tokens_per_word + extra_tokens (chat template, BOS)."""

    tokens_per_word: float = 1.0
    extra_tokens: float = 0.0

    @classmethod
    def fit(cls, fewer: tuple[int, int], more: tuple[int, int]) -> WordLength:
        """Fits two prompts, given as (words, tokens)."""
        tokens_per_word = max(0.1, (more[1] - fewer[1]) / (more[0] - fewer[0]))
        return cls(tokens_per_word, max(0.0, fewer[1] - fewer[0] * tokens_per_word))

    def num_words(self, num_tokens: int) -> int:
        return max(1, round((num_tokens - self.extra_tokens) / self.tokens_per_word))


def random_prompt(rng: random.Random, num_words: int) -> BenchPrompt:
    return BenchPrompt(" ".join(rng.choices(_WORDS, k=num_words)))


def read_prompts(path: Path, is_chat: bool) -> list[BenchPrompt]:
    """Reads JSON lines with "prompt" or, for a chat, "messages", and optionally "max_tokens" (vLLM: "output_tokens").
    Raises ConfigError that names the line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path}: {error}") from None
    prompts = [_prompt(line, f"{path}:{number}", is_chat) for number, line in enumerate(lines, 1) if line.strip()]
    if not prompts:
        raise ConfigError(f"--dataset-path {path}: the file has no prompt")
    return prompts


def _prompt(line: str, where: str, is_chat: bool) -> BenchPrompt:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    row = row if isinstance(row, dict) else {}
    max_tokens = row.get("max_tokens", row.get("output_tokens", 0))
    if not isinstance(max_tokens, int) or max_tokens < 0:
        raise ConfigError(f"{where}: max_tokens must be a whole number")
    if is_chat and isinstance(row.get("messages"), list):
        return BenchPrompt("", tuple(row["messages"]), max_tokens)
    if isinstance(row.get("prompt"), str):
        return BenchPrompt(row["prompt"], (), max_tokens)
    wanted = '"prompt" (text) or "messages"' if is_chat else '"prompt" (text)'
    raise ConfigError(f"{where}: a line must be an object with {wanted}")
