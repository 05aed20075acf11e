"""The number of token ids in a folder's tokenizer.json. Not here: tokenizing (the gateway does)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from outrider.drafting.checkpoints.config_fields import read_json_object


def tokenizer_size(folder: Path) -> int | None:
    """Returns the largest token id of folder/tokenizer.json plus 1; None without a file or ids.

    Raises CheckpointRefused if it is not a JSON object.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    content = read_json_object(file)
    token_ids: list[Any] = []
    model = content.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocab, dict):
        token_ids.extend(vocab.values())
    elif isinstance(vocab, list):  # Unigram: [piece, score] in the order of the ids
        token_ids.append(len(vocab) - 1)
    added = content.get("added_tokens")
    for entry in added if isinstance(added, list) else ():
        if isinstance(entry, dict):
            token_ids.append(entry.get("id"))
    known = [token_id for token_id in token_ids if isinstance(token_id, int)]
    return max(known) + 1 if known else None
