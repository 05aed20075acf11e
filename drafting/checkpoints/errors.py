"""The error of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.drafting.heads.errors import HeadConfigError
from outrider.engine.errors import ModelRefused
from outrider.shared.errors import ConfigError


class CheckpointRefused(ConfigError):
    """A checkpoint cannot be served as it is. The message has the cause and, if known, the fix."""

    def __init__(self, path: str | Path, cause: str, fix: str | None = None) -> None:
        self.path = str(path)
        self.cause = cause
        self.fix = fix
        super().__init__(f"{path}: {cause}" + (f" Fix: {fix}" if fix else ""))


@contextmanager
def refusing(path: str | Path, doing: str) -> Iterator[None]:
    """Turns any error inside into CheckpointRefused.

    Only for library calls with values from a file: what transformers, torch and safetensors raise cannot be listed.
    """
    try:
        yield
    except CheckpointRefused:
        raise
    except ModelRefused as error:
        raise CheckpointRefused(error.path, error.cause, error.fix) from error
    except HeadConfigError as error:
        raise CheckpointRefused(path, error.message) from error
    except Exception as error:
        text = " ".join(str(error).split())[:300]
        raise CheckpointRefused(path, f"{doing} failed: {type(error).__name__}: {text}") from error
