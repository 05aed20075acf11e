"""The version of the installed distribution."""

from __future__ import annotations

from importlib import metadata


def outrider_version() -> str:
    try:
        return metadata.version("outrider")
    except metadata.PackageNotFoundError:
        return "0+unknown"
