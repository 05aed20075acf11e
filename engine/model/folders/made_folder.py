"""Folders that are made once from a checkpoint's files, and kept in the user's cache.

Not here: what is in them (gguf/folder, mistral_folder, tokenizer_folder).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path


def made_folder(kind: str, version: int, name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> str:
    """Returns outrider/KIND/.../NAME in the cache, filled by `make`; another folder for each state of the sources.

    version: of the written files; changing it remakes the folders. Raises what `make` raises.
    """
    folder = _user_cache() / kind / _key(version, sources) / name
    if not folder.is_dir():
        _make(folder, make)
    return str(folder)


def _make(folder: Path, make: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Made in a temporary folder and renamed: another process may be making the same one.
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        made = Path(scratch) / "made"
        made.mkdir()
        make(made)
        try:
            made.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise


def _user_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "outrider"


def _key(version: int, sources: Sequence[Path]) -> str:
    digest = hashlib.blake2b(str(version).encode(), digest_size=12)
    for source in sources:
        state = source.stat()
        digest.update(f"{source}\0{state.st_size}\0{state.st_mtime_ns}\0".encode())
    return digest.hexdigest()
