"""Checks that the services are installed too: the client's wheel does not include them."""

from __future__ import annotations

from importlib.util import find_spec

from outrider.shared.errors import ConfigError

_OF_SERVERS = (
    "outrider.verifier_service",
    "outrider.drafter_service",
    "outrider.gateway",
    "torch",
    "transformers",
    "fastapi",
    "numba",
)


def check_server_installed() -> None:
    """Checks that the services are installed. Raises ConfigError that names what is missing and how to install it."""
    missing = [name for name in _OF_SERVERS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this environment cannot serve: {', '.join(missing)} is not installed. Install torch (the build for your "
            "machine), then: pip install 'outrider[server]' (instead of outrider-client)"
        )
