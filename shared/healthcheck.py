"""Asks whether services are well, for a container's HEALTHCHECK: exit code 0 if all of them are, else 1 and why.

    python -m shared.healthcheck 127.0.0.1:7001
    python -m shared.healthcheck 127.0.0.1:8001 http://127.0.0.1:8000/ready

host:port is asked by the gRPC health protocol, a URL must answer with a status under 400. Not a monitor: each target is
asked once, and a service that is draining is not well.
"""

from __future__ import annotations

import asyncio
import sys
import urllib.error
import urllib.request
from collections.abc import Sequence

from shared import rpc

CHECK_TIMEOUT_S = 4.0
EXIT_WELL, EXIT_NOT_WELL, EXIT_USAGE = 0, 1, 2


async def reason_not_well(target: str, timeout_s: float = CHECK_TIMEOUT_S) -> str | None:
    """None if `target` (host:port or an http URL) is well, else what is wrong."""
    if target.startswith("http://"):
        return await asyncio.to_thread(_reason_http, target, timeout_s)
    channel = rpc.open_channel(target)
    try:
        return None if await rpc.is_serving(channel, timeout_s) else "does not say SERVING"
    finally:
        await channel.close()


def _reason_http(url: str, timeout_s: float) -> str | None:
    # A proxy that the environment names is for the world outside, not for the next port.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return f"{error.code} {error.read(500).decode(errors='replace')}".rstrip()
    except OSError as error:
        return str(error)


async def check(targets: Sequence[str]) -> int:
    """Asks all at once; prints one line for each that is not well."""
    reasons = await asyncio.gather(*(reason_not_well(target) for target in targets))
    for target, reason in zip(targets, reasons, strict=True):
        if reason is not None:
            print(f"{target}: {reason}")
    return EXIT_WELL if all(reason is None for reason in reasons) else EXIT_NOT_WELL


def main(argv: Sequence[str]) -> int:
    if not argv or any(argument.startswith("-") for argument in argv):
        print("usage: python -m shared.healthcheck HOST:PORT|http://HOST:PORT/PATH ...", file=sys.stderr)
        return EXIT_USAGE
    return asyncio.run(check(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
