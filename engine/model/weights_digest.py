"""A digest of a checkpoint's weights: two checkpoints of one config with the same digest are the same model.

The fingerprint of the arithmetic (engine/numerics.py) sees most changes of weights, but not those of rows and experts
that its probe does not use. Where a target's weights can be replaced, its kind has both.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from outrider.shared.checkpoint.file_names import linked_parts, weight_files

_DIGEST_CHARS = 16


def checkpoint_files(folder: Path) -> list[Path]:
    """Returns the files with the weights, in the order of their names. Raises ConfigError if there is none."""
    return linked_parts(folder) or weight_files(folder)


def weights_digest(folder: Path) -> str:
    """Returns 16 hexadecimal digits of the SHA-256 of the weight files' contents. Raises ConfigError."""
    digest = hashlib.sha256()
    for path in checkpoint_files(folder):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:_DIGEST_CHARS]
