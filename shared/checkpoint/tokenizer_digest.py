"""The digest by which two parties find out whether their token ids mean the same: a drafter and an engine of another
make, a receipt and who verifies it.

Only the standard library: the proposer in another engine computes it too, without the rest of Outrider.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path


def tokenizer_digest(folder: str | Path) -> str:
    """Returns the SHA-256 of the ids and tokens in a folder's tokenizer.json; "" where there are none to be read.

    Added tokens are left out: they differ between chat and base models that share all others.
    """
    try:
        vocab = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
        if isinstance(vocab, dict):
            tokens = [(token_id, token) for token, token_id in vocab.items()]
        else:  # Unigram: tokens with their scores, in order
            tokens = [(token_id, token) for token_id, (token, _) in enumerate(vocab)]
        return digest_of(tokens) if tokens else ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def digest_of(tokens: Iterable[tuple[int, str]]) -> str:
    """Returns the SHA-256 of ids and tokens, whatever their order."""
    return hashlib.sha256(json.dumps(sorted(tokens)).encode()).hexdigest()
