"""Whether the services are installed beside the client; its own wheel comes without them."""

from __future__ import annotations

from importlib.util import find_spec

from shared.errors import ConfigError

_OF_SERVERS = ("verifier_service", "drafter_service", "gateway", "torch", "transformers", "fastapi", "numba")


def check_server_installed() -> None:
    """Raises ConfigError that says what is missing and how to get it."""
    missing = [name for name in _OF_SERVERS if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this environment cannot serve, {', '.join(missing)} is not installed. Install torch (the build for your "
            "machine), then the whole: pip install 'outrider[server]' (instead of outrider-client)"
        )
