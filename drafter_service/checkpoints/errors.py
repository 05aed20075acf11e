"""The one error of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from drafter_service.heads.errors import HeadConfigError
from shared.errors import ConfigError


class CheckpointRefused(ConfigError):
    """A checkpoint cannot be served as it is. The message names the cause and, where there is one, the fix."""

    def __init__(self, path: str | Path, cause: str, fix: str | None = None) -> None:
        self.path = str(path)
        self.cause = cause
        self.fix = fix
        super().__init__(f"{path}: {cause}" + (f" Fix: {fix}" if fix else ""))


@contextmanager
def refusing(path: str | Path, doing: str) -> Iterator[None]:
    """Turns whatever goes wrong inside into a CheckpointRefused.

    Only around calls into libraries with values out of a file: what transformers, torch or safetensors raise on odd
    ones is no list that one could write down.
    """
    try:
        yield
    except CheckpointRefused:
        raise
    except HeadConfigError as error:
        raise CheckpointRefused(path, error.message) from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointRefused(path, f"{doing} failed: {type(error).__name__}: {text}") from error
