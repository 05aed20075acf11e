"""The 64-bit key of a session's sampling noise: made by the gateway, used by drafter and verifier alike."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

_MASK64 = (1 << 64) - 1


def stream_key(seed: int, prompt_token_ids: Sequence[int], choice_index: int) -> int:
    """Returns the key of a choice's noise: one seed gives different noise for different prompts and choices."""
    digest = hashlib.blake2b(digest_size=8, person=b"outrider-noise")
    digest.update(struct.pack("<QII", seed & _MASK64, choice_index, len(prompt_token_ids)))
    digest.update(struct.pack(f"<{len(prompt_token_ids)}I", *prompt_token_ids))
    return int.from_bytes(digest.digest(), "little")
