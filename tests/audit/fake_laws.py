"""A target and a draft as tables of laws: the last tokens of a context choose a row."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
VOCABULARY = 256
EOS = 0
_STATES = 1024
_LISTED = 20
_SYLLABLES = ("ka", "lo", "mi", "ne", "pu", "ra", "si", "to", "ve", "wo", "zu", "che", "dri", "fla", "gon", "hu")


def log_softmax(logits: Array) -> Array:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


class Laws:
    def __init__(self) -> None:
        rng = np.random.default_rng(7)
        sharpness = rng.uniform(1.5, 4.0, (_STATES, 1))
        logits = rng.normal(size=(_STATES, VOCABULARY)) * sharpness
        logits[:, EOS] = -12.0
        self.target: Array = log_softmax(logits)
        self.draft: Array = log_softmax(logits + rng.normal(size=logits.shape) * 0.9)
        self.target_p, self.draft_p = np.exp(self.target), np.exp(self.draft)
        self.words = [(" " if i % 3 else "") + _SYLLABLES[i % 16] + _SYLLABLES[i // 16] for i in range(VOCABULARY)]

    @staticmethod
    def state(ids: Sequence[int]) -> int:
        value = 2166136261
        for token in ids[-3:]:
            value = ((value ^ (int(token) + 1)) * 16777619) & 0xFFFFFFFF
        return ((value ^ (value >> 13)) * 2654435761 & 0xFFFFFFFF) % _STATES

    @staticmethod
    def encode(text: str) -> list[int]:
        return [zlib.crc32(word.encode()) % (VOCABULARY - 1) + 1 for word in text.split()] or [1]

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self.words[token] for token in ids if token != EOS)


def listed(law: Array, token: int, size: int) -> dict[str, float]:
    """What vLLM reports: the most likely ones, and the chosen one."""
    top = np.argsort(-law)[: min(size, _LISTED)]
    return {f"token_id:{t}": float(law[t]) for t in (*top, token)}


def request_settings(body: dict[str, Any]) -> dict[str, Any]:
    stop = body.get("stop") or []
    return {
        "temperature": body.get("temperature", 1.0),
        "top_k": body.get("top_k") or 0,
        "top_p": body.get("top_p", 1.0),
        "presence": body.get("presence_penalty") or 0.0,
        "frequency": body.get("frequency_penalty") or 0.0,
        "bias": {int(token): value for token, value in (body.get("logit_bias") or {}).items()},
        "min_tokens": body.get("min_tokens") or 0,
        "stop_ids": body.get("stop_token_ids") or [],
        "ignore_eos": bool(body.get("ignore_eos")),
        "max_tokens": body.get("max_tokens") or 16,
        "stop": [stop] if isinstance(stop, str) else stop,
        "logprobs": int(body.get("logprobs") or 0),
    }
