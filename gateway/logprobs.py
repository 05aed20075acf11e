"""Log-probabilities in the three shapes of the OpenAI API and vLLM: completions, chat, prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.detokenizer import make_text_decoder
from gateway.response_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TopLogprob,
)
from gateway.tokenizer import Tokenizer
from shared.messages import TokenLogprob

# JSON has no -inf; vLLM shows masked tokens as this.
_LOWEST = -9999.0


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if math.isfinite(logprob) else _LOWEST


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    token_texts: Sequence[str],
    entries: Sequence[TokenLogprob | None],
    num_top: int,
    text_offset: int,
) -> CompletionLogprobs:
    """The legacy shape. `text_offset` is where the first token's text begins; None is a token without a law."""
    shown: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, text, entry in zip(token_ids, token_texts, entries, strict=True):
        token = tokenizer.token_text(token_id)
        shown["tokens"].append(token)
        shown["text_offset"].append(text_offset)
        text_offset += len(text)
        if entry is None:
            shown["token_logprobs"].append(None)
            shown["top_logprobs"].append(None)
            continue
        pairs = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
        top = {tokenizer.token_text(other): _finite(logprob) for other, logprob in pairs}
        top.setdefault(token, _finite(entry.logprob))  # the chosen token is always there, as in vLLM
        shown["token_logprobs"].append(_finite(entry.logprob))
        shown["top_logprobs"].append(top)
    return shown


def join_completion_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def echo_logprobs(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprob], num_top: int
) -> CompletionLogprobs:
    """The prompt in the legacy shape; its first token follows nothing and has no log-probability."""
    decoder = make_text_decoder(tokenizer, (), skip_special_tokens=True)
    texts = [decoder.push(token_id) for token_id in prompt_token_ids]
    laws = _after_first(prompt_token_ids, entries)
    return completion_logprobs(tokenizer, prompt_token_ids, texts, laws, num_top, 0)


def _after_first(prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> list[TokenLogprob | None]:
    if len(entries) != len(prompt_token_ids):
        return [None] * len(prompt_token_ids)
    return [None, *entries[1:]]


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], entries: Sequence[TokenLogprob], num_top: int
) -> ChatLogprobs:
    content: list[ChatTokenLogprob] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        pairs = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
        chosen = _token_logprob(tokenizer, token_id, entry.logprob)
        content.append({**chosen, "top_logprobs": [_token_logprob(tokenizer, *pair) for pair in pairs]})
    return {"content": content}


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return {"token": data.decode("utf-8", "replace"), "logprob": _finite(logprob), "bytes": list(data)}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprob]
) -> PromptLogprobs:
    """vLLM's shape: null for the first token, then per token {id: {logprob, rank, decoded_token}}."""
    shown: PromptLogprobs = []
    for token_id, entry in zip(prompt_token_ids, _after_first(prompt_token_ids, entries), strict=True):
        if entry is None:
            shown.append(None)
            continue
        row = {str(token_id): _prompt_token(tokenizer, token_id, entry.logprob, entry.rank)}
        tops = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
        for rank, (other, logprob) in enumerate(tops, start=1):
            row.setdefault(str(other), _prompt_token(tokenizer, other, logprob, rank))
        shown.append(row)
    return shown


def _prompt_token(tokenizer: Tokenizer, token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
    return {"logprob": _finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
