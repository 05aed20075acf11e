"""A benchmark's prompts: random words of a given length, or the lines of a file.

No tokenizer is needed: the server's usage counts show how many tokens a word takes (`WordLength.fit`). Scripts written
for vLLM, which have one, call `add_dataset_parser` and `get_samples`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class SampleRequest:
    """A prompt of `get_samples` under vLLM's names: text, or a chat's messages."""

    prompt: str | list[dict[str, Any]]
    prompt_len: int
    expected_output_len: int
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Adds the options that `get_samples` reads, under vLLM's names."""
    parser.add_argument("--dataset-name", choices=("random", "custom"), default="random")
    parser.add_argument("--dataset-path", help="custom: JSON lines, as `outrider bench` reads them")
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--random-input-len", type=int, default=1024)
    parser.add_argument("--random-output-len", type=int, default=128)
    parser.add_argument("--custom-output-len", type=int, default=256)
    parser.add_argument("--skip-chat-template", action="store_true")
    parser.add_argument("--enable-multimodal-chat", action="store_true", help="prompts as messages of a chat")


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """Returns `num_prompts` prompts: random words, or those of a file, from its start again where it has fewer, in the
    chat template unless that is skipped. tokenizer: transformers'. Raises ConfigError.
    """
    if args.dataset_name == "random":
        rng = random.Random(args.seed)
        prompts = [random_prompt(rng, args.random_input_len) for _ in range(args.num_prompts)]
        return [_sample(prompt.text, args.random_output_len, tokenizer) for prompt in prompts]
    if not args.dataset_path:
        raise ConfigError("--dataset-path: name the file of --dataset-name custom")
    prompts = read_prompts(Path(args.dataset_path), is_chat=False)
    taken = itertools.islice(itertools.cycle(prompts), args.num_prompts)
    samples = [_sample(prompt.text, args.custom_output_len, tokenizer) for prompt in taken]
    if args.skip_chat_template or getattr(args, "custom_skip_chat_template", False):
        return samples
    chats = [[{"role": "user", "content": sample.prompt}] for sample in samples]
    if args.enable_multimodal_chat:
        return [replace(sample, prompt=chat) for sample, chat in zip(samples, chats, strict=True)]
    rendered = tokenizer.apply_chat_template(chats, add_generation_prompt=True, tokenize=False)
    return [_sample(text, args.custom_output_len, tokenizer) for text in rendered]


def _sample(text: str, output_len: int, tokenizer: Any) -> SampleRequest:
    return SampleRequest(text, len(tokenizer.encode(text, add_special_tokens=False)), output_len)
