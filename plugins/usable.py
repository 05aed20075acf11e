"""What an engine and a drafter must know of each other: which tokens are the engine's, and which drafts it can use."""

from __future__ import annotations

import math
from pathlib import Path

from outrider.shared.checkpoint.tokenizer_digest import tokenizer_digest


def usable(token_ids: list[int], confidence: bytes, *, vocab_size: int, min_confidence: float) -> list[int]:
    """The draft as far as it is likely enough; none if any id is not the engine's."""
    if not all(0 <= token_id < vocab_size for token_id in token_ids):
        return []
    for place, joint in enumerate(_joint(confidence[: len(token_ids)])):
        if joint < min_confidence:
            return token_ids[:place]
    return token_ids


def digest_of(name: str, revision: str | None) -> str:
    """The digest of a target's tokenizer, a folder or Hub id; "" where its tokenizer.json is not on this machine."""
    if Path(name).is_dir():
        return tokenizer_digest(name)
    try:
        from huggingface_hub import try_to_load_from_cache  # type: ignore[import-not-found,unused-ignore]

        found = try_to_load_from_cache(name, "tokenizer.json", revision=revision)
    except Exception:  # not a Hub id, or no such package
        return ""
    return tokenizer_digest(Path(found).parent) if isinstance(found, str) else ""


def _joint(confidence: bytes) -> list[float]:
    return [math.prod(byte / 255 for byte in confidence[: place + 1]) for place in range(len(confidence))]
