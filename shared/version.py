"""The version of the installed distribution; all wheels are built from one pyproject.toml."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib import metadata


@cache
def outrider_version() -> str:
    for distribution in ("outrider", "outrider-client"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(distribution)
    return "0+unknown"
