"""Errors of the engine.

Not here: errors of the kernels (kernels.errors) and of the wire (shared.errors).
"""

from __future__ import annotations

from outrider.shared.errors import OutriderError


class EngineError(OutriderError):
    """Base class of the engine's errors."""


class ModelRefused(EngineError):
    """A checkpoint cannot be served correctly. The message names the cause and, if there is one, the fix."""

    def __init__(self, path: str, cause: str, fix: str | None = None) -> None:
        self.path = path
        self.cause = cause
        self.fix = fix
        super().__init__(f"{path}: {cause}" + (f" Fix: {fix}" if fix else ""))


class BackendUnavailable(EngineError):
    """The requested attention backend, device or dtype is not available here."""


class RowInvarianceError(EngineError):
    """An operation of the model cannot be made row-invariant."""


class IntegrityError(Exception):
    """The bookkeeping is inconsistent: a bug."""
