"""Errors of the draft heads. Not here: errors of checkpoints (drafting.checkpoints.errors)."""

from __future__ import annotations

from outrider.shared.errors import ConfigError


class HeadConfigError(ConfigError):
    """A head cannot be built or called as requested; the message has the setting and its value."""


def require_positive(owner: str, **sizes: int) -> None:
    """Raises HeadConfigError for the first size below 1."""
    for name, size in sizes.items():
        if size < 1:
            raise HeadConfigError(f"{owner}: {name}={size} must be at least 1", param=name)


def require_shape(owner: str, name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raises HeadConfigError if a tensor's shape is not the config's."""
    if tuple(found) != wanted:
        raise HeadConfigError(f"{owner}: {name} has shape {list(found)}, its config says {list(wanted)}", param=name)
