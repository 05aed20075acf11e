"""Log-probabilities in the three formats of the OpenAI API and vLLM: completions, chat, prompt."""

from __future__ import annotations

import math
from collections.abc import Sequence

from outrider.gateway.openai.answer_types import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprobs,
    PromptTokenLogprob,
    TopLogprob,
)
from outrider.gateway.request.detokenizer import make_text_decoder
from outrider.gateway.request.tokenizer import Tokenizer
from outrider.shared.messages import TokenLogprob

# JSON has no -inf; vLLM shows masked tokens with this value.
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
    *,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """The legacy format. text_offset: where the first token's text begins. None: a token without a distribution.

    as_ids: tokens are named by their ids.
    """
    shown: CompletionLogprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, text, entry in zip(token_ids, token_texts, entries, strict=True):
        token = _name(tokenizer, token_id, as_ids)
        shown["tokens"].append(token)
        shown["text_offset"].append(text_offset)
        text_offset += len(text)
        if entry is None:
            shown["token_logprobs"].append(None)
            shown["top_logprobs"].append(None)
            continue
        pairs = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))[:num_top]
        top = {token: _finite(entry.logprob)}  # always there and the first, as in vLLM
        for other, logprob in pairs:
            top.setdefault(_name(tokenizer, other, as_ids), _finite(logprob))
        shown["token_logprobs"].append(_finite(entry.logprob))
        shown["top_logprobs"].append(top)
    return shown


def _name(tokenizer: Tokenizer, token_id: int, as_ids: bool) -> str:
    return f"token_id:{token_id}" if as_ids else tokenizer.token_text(token_id)


def join_completion_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    return {
        "tokens": first["tokens"] + second["tokens"],
        "token_logprobs": first["token_logprobs"] + second["token_logprobs"],
        "top_logprobs": first["top_logprobs"] + second["top_logprobs"],
        "text_offset": first["text_offset"] + second["text_offset"],
    }


def echo_logprobs(
    tokenizer: Tokenizer,
    prompt_token_ids: Sequence[int],
    echo_text: str,
    entries: Sequence[TokenLogprob],
    num_top: int,
    *,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """Returns the prompt in the legacy format; its first token has no log-probability."""
    texts = _echoed_texts(tokenizer, prompt_token_ids, echo_text)
    laws = _after_first(prompt_token_ids, entries)
    return completion_logprobs(tokenizer, prompt_token_ids, texts, laws, num_top, 0, as_ids=as_ids)


def _echoed_texts(tokenizer: Tokenizer, prompt_token_ids: Sequence[int], echo_text: str) -> list[str]:
    """Returns, per token, the part of the echoed text that it completes: "" for a special token that is not in the
    text, such as one that the tokenizer put in front.
    """
    decoder = make_text_decoder(tokenizer, (), skip_special_tokens=False)
    texts: list[str] = []
    end = 0
    for token_id in prompt_token_ids:
        text = decoder.push(token_id)
        if token_id in tokenizer.special_ids and not echo_text.startswith(text, end):
            text = ""
        texts.append(text)
        end += len(text)
    return texts


def _after_first(prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprob]) -> list[TokenLogprob | None]:
    if len(entries) != len(prompt_token_ids):
        return [None] * len(prompt_token_ids)
    return [None, *entries[1:]]


def chat_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    entries: Sequence[TokenLogprob],
    num_top: int,
    *,
    as_ids: bool = False,
    named: bool = False,
) -> ChatLogprobs:
    """Returns log-probabilities in the chat format. as_ids: tokens are named by their ids; their bytes stay those of
    the text. named: the request has named the entries' tokens, so all are shown, after the chosen one, as in vLLM.
    """
    content: list[ChatTokenLogprob] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        pairs = list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))
        if named:
            pairs = [(token_id, entry.logprob), *(pair for pair in pairs if pair[0] != token_id)]
        else:
            pairs = pairs[:num_top]
        chosen = _token_logprob(tokenizer, token_id, entry.logprob, as_ids)
        content.append({**chosen, "top_logprobs": [_token_logprob(tokenizer, *pair, as_ids) for pair in pairs]})
    return {"content": content}


def _token_logprob(tokenizer: Tokenizer, token_id: int, logprob: float, as_ids: bool) -> TopLogprob:
    data = tokenizer.token_bytes(token_id)
    return {"token": _name(tokenizer, token_id, as_ids), "logprob": _finite(logprob), "bytes": list(data)}


def prompt_logprobs(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], entries: Sequence[TokenLogprob]
) -> PromptLogprobs:
    """vLLM's format: null for the first token, then per token {id: {logprob, rank, decoded_token}}."""
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
