"""A completion with a suffix, as the prompt that models with tokens for it were trained on (fill in the middle)."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.gateway.openai.schema import CompletionRequest
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.errors import InvalidRequest


@dataclass(frozen=True)
class _Form:
    """The tokens before the first text, between the two, and after the second."""

    begin: str
    between: str
    end: str = ""
    suffix_first: bool = False

    def prompt(self, prompt: str, suffix: str) -> str:
        texts = (suffix, prompt) if self.suffix_first else (prompt, suffix)
        return f"{self.begin}{texts[0]}{self.between}{texts[1]}{self.end}"

    def is_of(self, tokenizer: Tokenizer) -> bool:
        return {self.begin, self.between, self.end} - {""} <= tokenizer.control_tokens.keys()


_FORMS = (
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Form("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),  # DeepSeek
    _Form("[SUFFIX]", "[PREFIX]", suffix_first=True),  # Codestral
)


def with_suffix(body: CompletionRequest, suffix: str, tokenizer: Tokenizer) -> CompletionRequest:
    """Returns the request with its suffix in the prompts. Raises InvalidRequest."""
    if body.echo:
        raise _refused("cannot be combined with echo")
    if body.truncate_prompt_tokens is not None:
        raise _refused("cannot be combined with truncate_prompt_tokens")
    form = next((form for form in _FORMS if form.is_of(tokenizer)), None)
    if form is None:
        raise _refused("the served model's tokenizer has no tokens for filling in the middle")
    prompts = []
    for prompt in body.prompt:
        if not isinstance(prompt, str):
            raise _refused("needs prompts of text, not of token ids")
        prompts.append(form.prompt(prompt, suffix))
    return body.model_copy(update={"prompt": tuple(prompts)})


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"suffix: {reason}", param="suffix")
